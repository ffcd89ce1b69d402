# SPDX-License-Identifier: Apache-2.0
"""What ``import torch`` runs in every environment that has kvcore (entry points of torch.backends).

It does nothing unless a parent process left the settings of an emulated machine in the
environment: then the machine starts in this process too, before or after torch_npu is loaded.  It
stands beside the package because importing the package would cost every program that uses torch.
"""

from __future__ import annotations

import os

__all__ = ["autoload"]

ENVIRONMENT = "KVCORE_EMULATE"


def autoload() -> None:
    """Start the machine that the environment asks for, unless it runs."""
    if not os.environ.get(ENVIRONMENT):
        return
    from kvcore.emulator import starting

    starting.begin_as_asked()
