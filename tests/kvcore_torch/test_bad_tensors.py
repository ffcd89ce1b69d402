# SPDX-License-Identifier: Apache-2.0
"""Every operator with every kind of bad tensor in the place of each of its tensors."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvcore
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)
import test_library  # noqa: E402
import test_vendor_traces  # noqa: E402

import kvcore.torch  # noqa: E402

Sample = tuple[str, Any, tuple[Any, ...], dict[str, Any]]

#: None: the argument cannot be made into one (a CSR tensor of three axes).
KINDS: dict[str, Callable[[Any], Any]] = {
    "None": lambda x: None,
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "requires grad": lambda x: x.requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x),
    "meta": lambda x: x.to("meta"),
    "complex": lambda x: x.to(torch.complex64),
    "conj": lambda x: torch._conj(x.to(torch.complex64)),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1]]),
}


def samples() -> Iterator[Sample]:
    """(name, operator, arguments, keywords) of this library's and the vendor's operators."""
    for name, (arguments, keywords) in test_library.samples().items():
        for twin in ("", "_functional"):
            operator = getattr(torch.ops.kvcore, name + twin).default
            yield name + twin, operator, arguments, keywords
    for name, (arguments, keywords) in test_vendor_traces.samples().items():
        space, operator, overload = name.split(".")
        yield (
            name,
            getattr(getattr(getattr(torch.ops, space), operator), overload),
            *(
                arguments,
                keywords,
            ),
        )
    numbers = torch.zeros(1, dtype=torch.int64)
    swap = torch.ops._C_ascend.swap_blocks_batch.default
    yield "swap_blocks_batch", swap, (numbers, numbers.clone(), numbers.clone(), 0), {}


def own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


@pytest.mark.filterwarnings("ignore:.*(Sparse|sparse|quantiz|nested|prototype).*:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_every_operator_and_argument(kind: str) -> None:
    tried = 0
    with kvcore.torch.install(types.ModuleType("torch_npu")):
        for name, operator, arguments, keywords in samples():
            schema = {argument.name: argument for argument in operator._schema.arguments}
            given = dict(zip(schema, arguments, strict=False)) | keywords
            for argument, value in given.items():
                optional = "Optional" in str(schema[argument].type)
                if not isinstance(value, torch.Tensor) or (kind == "None" and optional):
                    continue
                try:
                    bad = KINDS[kind](own(value))
                except (RuntimeError, IndexError):
                    continue  # torch makes none of that shape or dtype
                called = {n: own(v) for n, v in given.items()} | {argument: bad}
                before = {n: own(v) for n, v in called.items() if n != argument and is_plain(v)}
                with pytest.raises(kvcore.KVCoreError) as caught:
                    operator(**called)
                told = str(caught.value)
                assert argument in told or kind == "meta", f"{name}, {argument}: {told}"
                for other, was in before.items():
                    assert torch.equal(called[other], was), f"{name} wrote {other}"
                tried += 1
    assert tried > 20
