# SPDX-License-Identifier: Apache-2.0
"""docs/torch.md: its Python runs, its failure is the real one, and it names everything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import _kvcore_pytest
import kvcore
from kvcore.testing import assert_kv_equal
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)
import kvcore.torch  # noqa: E402

TEXT = (Path(__file__).parents[2] / "docs" / "torch.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_the_python_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(BLOCKS):
        if not block.startswith("# conftest.py"):  # what the README shows and is tested there
            exec(compile(block, f"docs/torch.md, Python block {number}", "exec"), scope)
    assert "1 calls by kvcore, as recorded" in capsys.readouterr().out
    assert BLOCKS[-1].startswith("# conftest.py")
    with kvcore.torch.install(scope["torch_npu"]):
        scope["test_step"](scope["torch_npu"], assert_kv_equal)


def test_the_failure_is_what_a_test_prints() -> None:
    (shown,) = re.findall(r"^```text\n(.*?)\n```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    key, cache = torch.arange(3 * 2 * 16).view(3, 2, 16).half(), torch.zeros(4, 8, 2, 16).half()
    want = cache.clone()
    kvcore.scatter_pa_kv_cache(key, want, torch.tensor([9, 12, 30]))
    kvcore.scatter_pa_kv_cache(key, cache, torch.tensor([9, 13, 30]))
    cache[3, 6, 1, 5] = 7
    with pytest.raises(AssertionError) as caught:
        assert_kv_equal(cache, want, name="key_cache")
    assert str(caught.value) == shown


def test_every_name_is_on_the_page(torch_npu: Any) -> None:
    names = [name for name in vars(torch_npu) if not name.startswith("__")]
    names += [name for name in vars(torch_npu.npu) if not name.startswith("__")]
    names += kvcore.torch.OPERATORS
    names += re.findall(r'"(--kvcore-\w+)"', Path(_kvcore_pytest.__file__).read_text())
    for name in names:
        plain = name.removesuffix("_functional").removesuffix("_v2")
        assert plain in TEXT, name
