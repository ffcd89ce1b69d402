# SPDX-License-Identifier: Apache-2.0
"""KV-cache operators of LLM inference on Ascend NPUs, exact and fast on a CPU."""

__version__ = "0.1.0"
