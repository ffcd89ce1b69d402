# SPDX-License-Identifier: Apache-2.0
"""What every operator refuses alike, argument by argument: the right error, and nothing written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from hostile_calls import CASES
from mutations import SIGNATURES
from refusal import NO_ARRAYS, BadIndex, Call


def nct() -> Call:
    made = CASES["Norm"].make()
    sizes = made["key"].shape[1] * made["key"].shape[2]
    options = {"scatter_mode": "Nct", "strides": (sizes, sizes), "offsets": (0, 0)}
    return Call(kvcore.scatter_pa_kv_cache, made, **options)


def key_alone() -> Call:
    lanes = ("key", "key_cache", "slot_mapping")
    made = CASES["Norm"].make()
    return Call(kvcore.scatter_pa_cache, {name: made[name] for name in lanes})


def five_axes() -> Call:
    made = CASES["PA_NZ"].make()
    for cache in ("key_cache", "value_cache"):
        blocks, columns, *page = made[cache].shape
        made[cache] = made[cache].reshape(blocks, 2, columns // 2, *page)
    return Call(kvcore.scatter_pa_kv_cache, made, cache_mode="PA_NZ")


def make(name: str) -> Call:
    """A legal call in guarded memory."""
    if name in OWN:
        return OWN[name]()
    case = CASES[name]
    options = {option: given for option, given in case.options.items() if option != "soc"}
    arrays = case.make()
    if "layer_id" in options:
        arrays["layer_id"] = np.array([options.pop("layer_id")], np.int32)
    return Call(case.call, arrays, **options)


OWN = {"Nct": nct, "key alone": key_alone, "PA_NZ of five axes": five_axes}
#: The legal calls: each operator, and the scatter in each of its modes.
CALLS = [
    *(name for name, case in CASES.items() if case.plan and name != "NHSD with a warning"),
    *OWN,
]
MADE = {name: make(name) for name in CALLS}


def those(*kinds: str) -> Any:
    """Parametrise a test with each call and each of its arguments of those kinds."""
    found = []
    for name, made in MADE.items():
        signature = SIGNATURES[made.function.__name__]
        data = tuple(argument for lane in signature.lanes.values() for argument in lane)
        groups = {
            "required": signature.required,
            "outputs": signature.outputs,
            "data": data,
            "paired": tuple(argument for argument in data if argument not in signature.required),
            "indices": signature.indices,
            "types": tuple(signature.lanes),
        }
        found += [
            pytest.param(name, argument, id=f"{name}-{argument}")
            for argument in dict.fromkeys(one for kind in kinds for one in groups[kind])
            if argument in made.arrays or kinds == ("types",)
        ]
    return pytest.mark.parametrize(("name", "argument"), found)


calls = pytest.mark.parametrize("name", CALLS)


@calls
def test_the_calls_are_legal(name: str) -> None:
    make(name).run()


@those("required", "paired")
def test_none(name: str, argument: str) -> None:
    """A required array, or one of two that come together, is not given."""
    found = make(name).refused(argument, "got None", kvcore.ParamNullError, **{argument: None})
    assert isinstance(found, TypeError)


@those("data", "indices")
def test_no_array(name: str, argument: str) -> None:
    made = make(name)
    for thing in NO_ARRAYS:
        if argument == "layer_id" and isinstance(thing, int | np.int64) and thing is not True:
            thing = 3  # an integer may name the layer: this one names none
        made.refused(argument, "an? .*array|readable|layer", **{argument: thing})


@those("data")
def test_a_dtype_that_no_operator_moves(name: str, argument: str) -> None:
    made = make(name)
    for dtype in ("float64", "int64", "uint64", "bool", "complex64", "O", "S2", "M8[s]", "V2"):
        wrong = np.zeros(made.arrays[argument].shape, dtype)
        made.refused(argument, "dtype", unreadable=True, **{argument: wrong})


@those("indices")
def test_an_index_of_another_dtype(name: str, argument: str) -> None:
    made = make(name)
    for dtype in ("int8", "int16", "uint32", "uint64", "float32", "bool", "O", "m8[s]"):
        wrong = np.ones(made.arrays[argument].shape, dtype)
        made.refused(argument, "int32 or int64", unreadable=True, **{argument: wrong})


@those("outputs")
def test_an_output_that_cannot_be_written(name: str, argument: str) -> None:
    made = make(name)
    frozen = made.arrays[argument].view()
    frozen.flags.writeable = False
    made.refused(argument, "writable", **{argument: frozen})


@those("types")
def test_no_name_of_a_type(name: str, argument: str) -> None:
    made = make(name)
    kinds: list[Any] = ["float64", "bf16", "int64", "bool", "", "float4", 7, 1.5, b"bfloat16"]
    kinds += [["bfloat16"], ..., float, np.dtype("f8"), np.dtype("i8"), np.dtype("S2")]
    for kind in (*kinds, np.array([1, 2]), {"names": 3}, object()):
        made.refused(argument, "one of float16, bfloat16", **{argument: kind})


@calls
def test_what_is_said_of_the_run(name: str) -> None:
    made = make(name)
    for count in (0, -1, 1025, 2**40, True, 1.5, "2", [2], BadIndex(), np.arange(2)):
        made.refused("num_threads", "from 1 to 1024", num_threads=count)
    for soc in ("A1", "a2", "A4", 950, True, 2.5, ["A2"], object()):
        made.refused("soc", "one of 'A2'", soc=soc)
    for backend in ("none", "", 5, -1, ["cpu"], object(), object):
        made.refused("backend", "one of|a Backend", backend=backend)
