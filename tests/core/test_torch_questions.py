# SPDX-License-Identifier: Apache-2.0
"""Tensors whose storage was made smaller than they are, that want a gradient, or are negative.

All are refused, in one call as by a plan, by what libtorch says in C and by what it says in Python.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import kvcore
from kvcore._core import torch_questions
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)


def arguments() -> dict[str, Any]:
    """Tensors that begin within their storages, with strides."""
    key = torch.arange(1, 3 * 2 * 16 + 1).half().view(3, 2, 16)[..., 8:]
    cache = torch.zeros(5, 4, 2, 8).half()[1:]
    slots = torch.tensor([0, 9, 0, 3, 0, 14])[1::2]
    return {"key": key, "key_cache": cache, "slot_mapping": slots}


def needed(tensor: Any) -> int:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())


CALLS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a call": lambda given: kvcore.scatter_pa_kv_cache(**given),
    "a plan": lambda given: kvcore.plan_scatter_pa_kv_cache(**given),
    "torch.ops": lambda given: torch.ops.kvcore.scatter_pa_cache(**given),
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("name", ["key", "key_cache", "slot_mapping"])
def test_a_storage_that_is_too_small(how: str, parameter: bool, name: str) -> None:
    import kvcore.torch

    given = arguments()
    if parameter:  # a subclass, which is read another way
        given = {n: torch.nn.Parameter(t, requires_grad=False) for n, t in given.items()}
    size = needed(given[name])
    storage = given[name].untyped_storage()
    storage.resize_(size)  # not a byte too much: legal
    CALLS[how](given)
    before = {n: t.clone() for n, t in given.items()}
    storage.resize_(size - 1)
    with pytest.raises(
        kvcore.ParamInvalidError,
        match=rf"^{name}: expected a storage of at least {size} bytes, .* got {size - 1}$",
    ):
        CALLS[how](given)
    storage.resize_(size)
    given[name].copy_(before[name])
    for other, content in before.items():
        assert torch.equal(given[other], content)
    CALLS[how](given)


@pytest.mark.parametrize("name", ["key", "key_cache", "slot_mapping"])
def test_a_plan_whose_storage_became_too_small(name: str) -> None:
    given = arguments()
    plan = kvcore.plan_scatter_pa_kv_cache(**given)
    plan.run()
    given[name].untyped_storage().resize_(needed(given[name]) - 1)
    with pytest.raises(kvcore.ParamInvalidError, match=rf"^{name}: expected the memory, shape and"):
        plan.run()


def test_tensors_without_elements_need_no_storage() -> None:
    given = arguments()
    given["key"], given["slot_mapping"] = given["key"][:0], given["slot_mapping"][:0]
    for name in ("key", "slot_mapping"):
        given[name].untyped_storage().resize_(0)
    kvcore.scatter_pa_kv_cache(**given)
    assert not given["key_cache"].any()


def test_how_libtorch_is_asked() -> None:
    """Here it answers; where it does not, Python does, and no call goes unasked."""
    found = torch_questions.questions()
    assert found is not None
    assert all(found)
    tensor = torch.zeros(4)[1:]
    assert torch_questions.is_too_small(tensor) is None
    tensor.untyped_storage().resize_(12)
    assert torch_questions.is_too_small(tensor) == (12, 16)
    assert torch_questions.is_too_small(tensor[:2]) is None
    assert torch_questions.is_too_small(tensor[:0]) is None


ASKED_IN_PYTHON = """
import sys
import torch, kvcore
from kvcore._core import torch_questions
found = torch_questions.questions()
torch_questions.questions = {
    "nothing": lambda: None,
    "storages": lambda: torch_questions.Questions(*found[:3]),
    "all": lambda: found,
}[sys.argv[1]]
given = {
    "key": torch.ones(1, 1, 16), "key_cache": torch.zeros(2, 4, 1, 16),
    "slot_mapping": torch.tensor([5]),
}
kvcore.scatter_pa_kv_cache(**given)
cache = given["key_cache"]
assert cache[1, 1].eq(1).all()
negative = torch.zeros(1, 1, 16, dtype=torch.complex64).conj().imag
view = torch.ones(1, 1, 16, requires_grad=True)[:]
for other in (
    {"key": torch.ones(1, 1, 16, requires_grad=True)}, {"key": view}, {"key": negative},
    {"key_cache": torch.zeros(2, 4, 1, 16, requires_grad=True)}, {"key": view.detach()},
):
    try:
        kvcore.scatter_pa_kv_cache(**given | other)
    except kvcore.ParamInvalidError as error:
        print(error.argument)
cache.untyped_storage().resize_(cache.nbytes - 1)
try:
    kvcore.scatter_pa_kv_cache(**given)
except kvcore.ParamInvalidError as error:
    print(error)
"""


@pytest.mark.parametrize("answers", ["nothing", "storages", "all"])
def test_a_libtorch_that_does_not_answer(answers: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED_IN_PYTHON, answers],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "key",
        "key",
        "key",
        "key_cache",
        "key_cache: expected a storage of at least 512 bytes, which the tensor spans, got 511",
    ], done.stderr
    assert done.returncode == 0
