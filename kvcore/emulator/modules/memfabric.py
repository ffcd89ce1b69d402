# SPDX-License-Identifier: Apache-2.0
"""``memfabric_hybrid``: its part ``offload``."""

from __future__ import annotations

__all__: list[str] = []
