# SPDX-License-Identifier: Apache-2.0
"""rich's console, with this program's manners."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["output"]


def output() -> Console:
    """A console on standard output that leaves a broken pipe to `kvcore.cli.main`."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich calls this while it handles the BrokenPipeError, and would exit with 1

    return Output()
