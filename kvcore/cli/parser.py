# SPDX-License-Identifier: Apache-2.0
"""argparse, with errors that say what is allowed."""

from __future__ import annotations

import argparse
import difflib
import sys
from argparse import _SubParsersAction as Subparsers  # the only name argparse has for it
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from kvcore.cli.printing import say, tell

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

__all__ = ["Parser", "Subparsers", "integer"]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes options as they are written, never cut short."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def parse_all(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """As ``parse_args``; an unknown option is answered by the sub-command it was given to."""
        namespace, unknown = self.parse_known_args(arguments)
        if unknown:
            getattr(namespace, "parser", self).refuse(unknown)
        if namespace.command is None:
            self.error(f"expected a command: {', '.join(self.commands())}")
        return namespace

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # The original swallows every OSError, a reader that has gone among them.
        if message and file is not None and file is sys.stdout:
            say(message, lines=True, end="")
        elif message:
            tell(message.removesuffix("\n"), lines=True)

    def commands(self) -> list[str]:
        """Names of the sub-commands."""
        return [
            name
            for action in self._actions
            if isinstance(action, Subparsers)
            for name in action.choices
        ]

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with what is not known and what is."""
        options = [name for name in self._option_string_actions if name.startswith("--")]
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        close = difflib.get_close_matches(word, options, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        self.error(f"unknown option {word}; {meant}allowed: {', '.join(options)}")


def integer(low: int, high: int) -> Callable[[str], int]:
    """A type for ``add_argument``: decimal integers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            shown = text if len(text) <= 40 else text[:40] + "..."
            raise argparse.ArgumentTypeError(
                f"expected an integer from {low} to {high}, got {shown!r}"
            )
        return value

    return parse
