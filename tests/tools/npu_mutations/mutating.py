# SPDX-License-Identifier: Apache-2.0
"""Ways to break a rule of the C interface in the backend, for tests that it is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.npu.call import tensors
from kvcore.npu.cann import library

__all__ = [
    "Break",
    "Patch",
    "instead",
    "never",
    "put",
    "reordered",
    "seen_under",
    "swap",
    "tensor",
    "twice",
    "words",
    "wrap",
]

Patch = pytest.MonkeyPatch
#: Breaks a rule for as long as the patch lasts.
Break = Callable[[Patch], None]


def seen_under(monkeypatch: Patch, act: Break, look: Callable[[], list[str]]) -> list[str]:
    """What ``look`` finds amiss while the rule is broken."""
    with monkeypatch.context() as patch:
        act(patch)
        return look()


def wrap(patch: Patch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by ``around(original, *arguments)``."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *given, **named: around(original, *given, **named))


def instead(patch: Patch, name: str, act: Callable[..., Any]) -> None:
    """Replace a function of CANN by ``act(cann, original, *arguments)``."""
    get, status = library.Cann.__getattr__, library.Cann.status

    def found(self: Any, asked: str) -> Any:
        original = get(self, asked)
        if asked != name:
            return original
        mutant = lambda *given: act(self, original, *given)  # noqa: E731
        setattr(self, asked, mutant)
        return mutant

    def unchecked(self: Any, asked: str) -> Any:
        original = status(self, asked)
        if asked != name:
            return original
        return lambda *given: act(self, original, *given)

    patch.setattr(library.Cann, "__getattr__", found)
    patch.setattr(library.Cann, "status", unchecked)


def reordered(name: str, *order: int) -> Break:
    """The arguments in another order."""
    return lambda patch: instead(
        patch, name, lambda _, original, *given: original(*[given[i] for i in order])
    )


def twice(name: str) -> Break:
    """Called, and called again."""

    def act(_: Any, original: Any, *given: Any) -> Any:
        original(*given)
        return original(*given)

    return lambda patch: instead(patch, name, act)


def never(name: str) -> Break:
    """Left out."""
    return lambda patch: instead(patch, name, lambda *_: 0)


def tensor(patch: Patch, change: Callable[..., tuple[Any, ...]]) -> None:
    """Tensors made of ``change(kind, dims, strides, offset, storage dims, address)``."""
    wrap(
        patch,
        tensors.TensorHandles,
        "_tensor",
        lambda original, self, *g: original(self, *change(*g)),
    )


def words(patch: Patch, kind: Any, change: Callable[[list[Any]], Any]) -> None:
    """Change the arguments of a call's first phase."""

    def around(original: Any, self: Any, *given: Any) -> list[Any]:
        found = list(original(self, *given))
        change(found)
        return found

    wrap(patch, kind, "phase_one", around)


def swap(i: int, j: int) -> Callable[[list[Any]], Any]:
    """Two of them the other way round."""

    def change(found: list[Any]) -> None:
        found[i], found[j] = found[j], found[i]

    return change


def put(i: int, value: Any) -> Callable[[list[Any]], Any]:
    """One of them replaced."""
    return lambda found: found.__setitem__(i, value)
