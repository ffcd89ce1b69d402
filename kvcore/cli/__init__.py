# SPDX-License-Identifier: Apache-2.0
"""The command ``kvcore``: one file in ``kvcore.cli.commands`` per sub-command.

A command is a module with ``register(subparsers)``: it adds a parser and sets ``run``, a
function from the parsed arguments to an exit status.  Nothing else has to know of it.  What a
command needs it imports when it runs, so that ``--help`` stays quick.
"""

from kvcore.cli.program import main

__all__ = ["main"]
