# SPDX-License-Identifier: Apache-2.0
"""Makes the pages of the reference from the docstrings and signatures of the public names."""

from __future__ import annotations

import importlib
import inspect
import re
from html import escape
from types import ModuleType
from typing import Any

#: Public modules, in the order of the reference.  Each page has the names of its __all__.
MODULES = (
    "kvcore",
    "kvcore.ops.slots",
    "kvcore.layout",
    "kvcore.soc",
    "kvcore.backends",
    "kvcore.errors",
    "kvcore.dtypes",
    "kvcore.threads",
    "kvcore.testing",
    "kvcore.hifloat8",
    "kvcore.runtime",
    "kvcore.runtime.abc",
    "kvcore.offload",
    "kvcore.replay",
    "kvcore.benchmarks",
    "kvcore.torch",
    "kvcore.emulator",
)


def pages() -> dict[str, str]:
    """Path below docs/ to Markdown."""
    return {path_of(name): page(name) for name in MODULES}


def path_of(name: str) -> str:
    return f"reference/{name.replace('.', '_')}.md"


def page(name: str) -> str:
    try:
        module = importlib.import_module(name)
    except ImportError as missing:
        return f"# {name}\n\nNot shown here: {escape(str(missing))}\n"
    parts = [f"# {name}", *prose(inspect.getdoc(module))]
    names = list(getattr(module, "__all__", ()))
    if name == "kvcore":
        parts.append(
            "Device, Stream, Event, Graph and Buffer: [kvcore.runtime](kvcore_runtime.md)."
        )
    for one in sorted(names, key=str.lower):
        found = getattr(module, one)
        if not isinstance(found, ModuleType):
            parts += entry(one, found)
    return "\n\n".join(parts) + "\n"


def entry(name: str, found: Any) -> list[str]:
    """A public name: its heading, how it is called, and what its docstring says."""
    if inspect.isclass(found):
        parts = [f"## {name}", code(name, found), *prose(inspect.getdoc(found))]
        for inner, member in vars(found).items():
            if not inner.startswith("_"):
                parts += part(f"{name}.{inner}", member)
        return parts
    if callable(found):
        return [f"## {name}", code(name, found), *prose(inspect.getdoc(found))]
    shown = repr(found)
    return [f"## {name}", fence(f"{name} = {shown if len(shown) < 200 else '...'}")]


def part(name: str, member: Any) -> list[str]:
    """A public method or property of a class that says what it does."""
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    text = inspect.getdoc(member)
    if isinstance(member, property):
        return [f"### {name}", *prose(text)] if text else []
    if inspect.isroutine(member) and text:
        return [f"### {name}", code(name, member), *prose(text)]
    return []


def code(name: str, function: Any) -> str:
    """The call with its parameters, one a line when they do not fit."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return fence(f"{name}(...)")
    given = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    signature = signature.replace(parameters=given)
    if inspect.isclass(function):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    text = re.sub(r"<([\w.]+) object at 0x\w+>", r"<\1>", f"{name}{signature}".replace("'", ""))
    if len(text) > 90:
        inside = [str(p).replace("'", "") for p in given]
        bare = next((n for n, p in enumerate(given) if p.kind is p.KEYWORD_ONLY), None)
        if bare is not None and not any(p.kind is p.VAR_POSITIONAL for p in given):
            inside.insert(bare, "*")
        result = text[text.rindex(")") :]
        text = f"{name}(\n" + "".join(f"    {one},\n" for one in inside) + result
    return fence(text)


def fence(text: str) -> str:
    return f"```python\n{text}\n```"


def prose(text: str | None) -> list[str]:
    """A docstring as Markdown: its sentence, then the rest as it is written; examples as code."""
    if not text:
        return []
    first, _, rest = text.partition("\n\n")
    rest, _, example = rest.partition(">>> ")
    made = ["<p>" + escape(" ".join(first.split())).replace("``", "") + "</p>"]
    if rest.strip():
        made.append(f'<pre class="doc">{escape(rest.strip())}</pre>')
    if example:
        made.append("```pycon\n>>> " + example.rstrip() + "\n```")
    return made
