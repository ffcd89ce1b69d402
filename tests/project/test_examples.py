# SPDX-License-Identifier: Apache-2.0
"""Every program in examples/ runs as it stands, and says what it should."""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from pathlib import Path

import anyio
import pytest

from tensors import WITHOUT_TORCH

FOLDER = Path(__file__).parents[2] / "examples"
ARGUMENTS = {
    "dense_tiers.py": ["--case", "1", "--factors", "5.02", "1.06"],
    # The default, glm-5.2, is predicted in tests/replay/test_predictions.py.
    "predict_offload.py": ["deepseek-v3.2"],
    "prefix_hits.py": ["--requests", "20"],
}
#: What must be found in what they print.
SAYS = {
    "dense_tiers.py": r"none +TTFT +1151.2 .* calibrates\n +DRAM .* predicted: .*\n"
    r"(.*\n)*  free figures: 2;",
    "layerwise_load.py": r"step 0: ([\d.]+ us)\nstep 1: \1\nstep 2: \1\none after the other",
    "paged_decode_numpy.py": r"(\w+: 59 rows of logits in 17 steps, equal to the bit\n){3}$",
    "paged_decode_torch.py": r"(\w+: prefill and 10 decode steps, logits equal to the bit\n){3}$",
    "predict_offload.py": r"(.*  fit\n){4}.*fitted, predicts nothing\n(.*\n)*"
    r".*the budget holds batch",
    "prefix_hits.py": r"blocks +hits.*\n +1024 .*\n +4096 .*\n +16384 .*\n +65536 .*\n$",
    "sparse_attention.py": r"attention equal to the bit; \d+ of 566 tokens came from",
    "streams.py": r"last row starts with 1.0, after 167.0 us\n(.*\n)*"
    r".*RAW: copy on h2d, copy on compute: 1024 bytes",
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_example(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = path.read_text(encoding="utf-8")
    assert f"python examples/{path.name}" in source, "the docstring says how it is run"
    if re.search(r"^import torch", source, flags=re.MULTILINE):
        pytest.importorskip("torch", reason=WITHOUT_TORCH)
    monkeypatch.setattr(sys, "argv", [str(path), *ARGUMENTS.get(path.name, [])])
    main = runpy.run_path(str(path))["main"]
    if inspect.iscoroutinefunction(main):
        said = []
        for backend in ("asyncio", "trio"):
            anyio.run(main, backend=backend)
            said.append(capsys.readouterr().out)
    else:
        main()
        said = [capsys.readouterr().out]
    for text in said:
        assert text
        assert re.search(SAYS.get(path.name, ""), text), text


def test_nothing_is_expected_of_an_example_that_is_gone() -> None:
    assert {*SAYS, *ARGUMENTS} <= {path.name for path in FOLDER.glob("*.py")}
