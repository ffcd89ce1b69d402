# SPDX-License-Identifier: Apache-2.0
"""The options of ``kvcore replay`` on its command line, from their declarations."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any

from kvcore.cli.parser import Parser, integer
from kvcore.errors import ParamInvalidError, fail
from kvcore.replay.options import (
    GROUPS,
    OffloadOptions,
    Option,
    default_of,
    flags_of,
    options_of,
)

__all__ = [
    "OFFLOAD_NAMES", "add_options", "as_written", "files_read", "option_named", "refuse_outputs",
    "settle", "written",
]  # fmt: skip

#: Options that name a file to write.
OUTPUTS = ("json", "perfetto", "html", "write_model")
OFFLOAD_NAMES = tuple(name for name, _ in options_of(OffloadOptions))


def number(low: float, high: float) -> Callable[[str], float]:
    """A type for ``add_argument``: numbers from ``low`` to ``high``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"expected a number from {low:g} to {high:g}, got {text[:40]!r}"
            )
        return value

    return parse


def add_options(parser: Parser) -> None:
    """Add all of them; what is not written is None until `settle`."""
    places: dict[str, Any] = {
        name: parser.add_argument_group(name, text or None) if name else parser
        for name, text in GROUPS.items()
    }
    for name, declared in options_of():
        if not declared.written:
            continue
        place = places[declared.group]
        if declared.exclusive:
            if declared.exclusive not in places:
                places[declared.exclusive] = place.add_mutually_exclusive_group()
            place = places[declared.exclusive]
        _add(place, name, declared)


def _add(place: Any, name: str, declared: Option) -> None:
    default = default_of(name)
    more: dict[str, Any] = {}
    said = declared.said or ("" if default is None else str(default))
    if declared.kind == "integer":
        high = declared.high if declared.limit is None else declared.limit
        more["type"] = integer(int(declared.low), int(high))
    elif declared.kind == "number":
        more["type"] = number(declared.low, declared.high)
    elif declared.choices and not isinstance(declared.choices, str):
        more["choices"] = declared.choices
    meaning = declared.meaning
    if declared.only == "offload" and declared.group != "offload":
        meaning += " (offload)"
    flags = flags_of(name, declared)
    if flags:
        more["dest"] = name
    if declared.several is not None:
        more["nargs"] = declared.several
    elif not flags:
        more["nargs"] = "?"
    place.add_argument(
        *(flags or (name,)),
        metavar=declared.metavar or ("NAME" if declared.kind == "text" else "N"),
        help=meaning + (f" (default: {said})" if said else ""),
        **more,
    )


def settle(namespace: argparse.Namespace) -> None:
    """Give every option that was not written its default; ``namespace.written`` has the others."""
    names = [name for name, declared in options_of() if declared.written]
    namespace.written = [name for name in names if getattr(namespace, name) is not None]
    for name in names:
        if name not in namespace.written:
            setattr(namespace, name, default_of(name))


def written(namespace: argparse.Namespace, only: str) -> list[str]:
    """Of the options that belong to one kind of replay those that were written, as they are."""
    kinds = dict(options_of())
    return [option_named(name) for name in namespace.written if kinds[name].only == only]


def option_named(name: str) -> str:
    """How an option is written."""
    return flags_of(name, dict(options_of())[name])[0]


def as_written(error: ParamInvalidError) -> ParamInvalidError:
    """The same error, with the option as it is written where it begins with a field's name."""
    words, field = str(error), error.argument or ""
    declared = dict(options_of()).get(field)
    if declared is None or not declared.written or not words.startswith(f"{field}: "):
        return error
    named = flags_of(field, declared)
    said = f"{named[0] if named else field}{words.removeprefix(field)}"
    return ParamInvalidError(said, argument=field, seen=error.seen, expected=error.expected)


def files_read(namespace: argparse.Namespace) -> tuple[str, ...]:
    """The files that the options name to be read."""
    named = (namespace.model, namespace.device, namespace.deployment)
    files = [name for name in named if name is not None and name.endswith((".toml", ".json"))]
    if namespace.model is not None and os.path.isdir(namespace.model):
        files.append(os.path.join(namespace.model, "config.json"))
    more = (namespace.trace, namespace.ids)
    return (*files, *(name for name in more if name is not None))


def refuse_outputs(namespace: argparse.Namespace) -> None:
    """Raise for options that name a file to write: ``--compare`` writes none."""
    for name in OUTPUTS:
        if name in namespace.written:
            fail(option_named(name), "no file to write together with --compare", "one")
