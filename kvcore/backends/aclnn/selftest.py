# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcore.backends.aclnn.selftest``: now ``python -m kvcore.npu.selftest``."""

from __future__ import annotations

import sys

from kvcore.npu.selftest import main

if __name__ == "__main__":
    sys.exit(main())
