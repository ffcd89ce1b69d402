# SPDX-License-Identifier: Apache-2.0
"""How the machine runs each of torch's overloads, and the page that shows it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "emulator.md"


@pytest.fixture(scope="module")
def behaviours(torch: ModuleType) -> dict[str, str]:
    import torch_npu  # noqa: F401

    from kvcore.emulator import operators

    return operators.behaviours()


def test_every_overload_has_one_behaviour(behaviours: dict[str, str]) -> None:
    assert len(behaviours) > 3000
    assert set(behaviours.values()) == {"deferred", "waits", "own", "composed", "refused"}
    for name, kind in {
        "add.Tensor": "deferred", "mm": "deferred", "index_select": "deferred",
        "copy_": "own", "as_strided": "own", "empty.memory_format": "own",
        "nonzero": "waits", "equal": "waits", "unique_dim": "waits",
        "matmul": "deferred", "index.Tensor": "deferred", "square": "composed",
        "mm.dtype": "refused", "cudnn_convolution": "refused",
    }.items():  # fmt: skip
        assert behaviours[name] == kind, name


def test_the_page_shows_them(torch: Any, behaviours: dict[str, str]) -> None:
    if not torch.__version__.startswith("2.13.0"):
        pytest.skip("the page's figures are those of torch 2.13.0")
    text = PAGE.read_text()
    shown = dict(re.findall(r"^\| (\w+) \| ([\d,]+) \|", text, re.MULTILINE))
    counts = Counter(behaviours.values())
    assert {kind: int(shown[kind].replace(",", "")) for kind in counts} == dict(counts)
    for name, kind in behaviours.items():
        if kind == "waits":
            assert f"`{name}`" in text


@pytest.mark.parametrize("name", ["mm.dtype", "cudnn_convolution", "_masked_scale"])
def test_what_nobody_has_is_refused_by_name(
    npu: ModuleType, torch: Any, behaviours: dict[str, str], name: str
) -> None:
    assert behaviours[name] == "refused"
    x = torch.ones(2, 2).npu()
    packet, _, overload = name.partition(".")
    arguments = {
        "mm.dtype": (x, x, torch.float32),
        "cudnn_convolution": (x, x, [0], [1], [1], 1, False, False, False),
        "_masked_scale": (x, x, 1.0),
    }[name]
    with pytest.raises((RuntimeError, NotImplementedError), match=f"aten::{packet}"):
        getattr(getattr(torch.ops.aten, packet), overload or "default")(*arguments)
    assert (x + 1).sum().item() == 8
