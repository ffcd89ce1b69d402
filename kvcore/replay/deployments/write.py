# SPDX-License-Identifier: Apache-2.0
"""A deployment as the text of a TOML file, as `Deployment.load` reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvcore.replay.deployments.deployment import Deployment

__all__ = ["as_toml"]


def as_toml(deployment: Deployment) -> str:
    """The file's text: read again it gives the same figures, bases and sources."""
    head = "# Units: see docs/predicting.md; written by kvcore calibrate.\n"
    return head + "\n".join(_table((), deployment.to_dict())).lstrip("\n") + "\n"


def _table(path: tuple[str, ...], data: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a table: its values, then the tables in it."""
    values = {key: value for key, value in data.items() if not isinstance(value, Mapping)}
    if path and (values or not data):
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in values.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _table((*path, key), value)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's text is TOML's, but for the one control character that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)
