# SPDX-License-Identifier: Apache-2.0
"""``acl``, CANN's own Python module: its part ``acl.rt``."""

from __future__ import annotations

__all__: list[str] = []
