# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcore`` is the command ``kvcore``."""

from __future__ import annotations

import sys

from kvcore.cli import main

if __name__ == "__main__":
    sys.exit(main())
