# SPDX-License-Identifier: Apache-2.0
"""The environment's word on instruction sets: KVCORE_ISA and KVCORE_STREAM_BYTES.

Read once, when kvcore is imported.
"""

from __future__ import annotations

import os

from kvcore._kernels import isa
from kvcore.errors import fail

__all__ = ["apply_environment"]


def apply_environment() -> None:
    """Select what the two variables name; ParamInvalidError lists what this CPU can run."""
    name = os.environ.get("KVCORE_ISA", "").strip()
    if name and name not in isa.available():
        fail("KVCORE_ISA", "one of " + ", ".join(isa.available()) + " on this CPU", repr(name))
    isa.select(name or None)
    text = os.environ.get("KVCORE_STREAM_BYTES", "").strip()
    if text and not (text.isascii() and text.isdigit() and int(text) < 1 << 62):
        fail("KVCORE_STREAM_BYTES", "a number of bytes from 0 to 2**62", repr(text))
    isa.set_stream_bytes(int(text) if text else None)
