# SPDX-License-Identifier: Apache-2.0
"""The errors as values: codes, builtin bases, fields, pickles."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore import errors

BASES = {
    "KVCoreError": (Exception, None),
    "ParamNullError": (TypeError, 161001),
    "ParamInvalidError": (ValueError, 161002),
    "SlotRangeError": (IndexError, 161002),
    "BackendUnavailableError": (RuntimeError, None),
    "DeviceOutOfMemoryError": (MemoryError, None),
    "StreamError": (RuntimeError, None),
    "CaptureError": (RuntimeError, None),
    "RaceError": (RuntimeError, None),
}
each = pytest.mark.parametrize("name", BASES)


def test_every_class_is_listed() -> None:
    found = {
        n
        for n, c in vars(errors).items()
        if isinstance(c, type) and issubclass(c, errors.KVCoreError)
    }
    assert found == set(BASES)
    assert found <= set(errors.__all__)
    assert issubclass(errors.KVPortabilityWarning, Warning)
    assert not issubclass(errors.KVPortabilityWarning, errors.KVCoreError)


@each
def test_bases_and_codes(name: str) -> None:
    kind = getattr(errors, name)
    base, code = BASES[name]
    assert issubclass(kind, base)
    assert issubclass(kind, errors.KVCoreError)
    assert kind("words").code == code
    assert kind("words", code=7).code == 7
    assert getattr(kvcore, name) is kind


def test_a_slot_out_of_range_is_an_invalid_parameter_too() -> None:
    assert issubclass(errors.SlotRangeError, errors.ParamInvalidError)
    assert issubclass(errors.SlotRangeError, ValueError)


def faults() -> list[errors.KVCoreError]:
    return [
        getattr(errors, name)(
            "x[3]: expected y, got z", argument="x", seen=seen, expected="y", code=code
        )
        for name in BASES
        for seen in (3, None, (1, 2), [1, "a"], "text", 2.5, lambda: None, np.int64(3), [object()])
        for code in (None, 5)
    ]


def test_errors_cross_process_borders() -> None:
    for error in faults():
        for made in (
            *(pickle.loads(pickle.dumps(error, protocol)) for protocol in range(6)),
            copy.copy(error),
            copy.deepcopy(error),
        ):
            assert type(made) is type(error)
            assert str(made) == str(error)
            assert made.argument == "x"
            assert made.expected == "y"
            assert made.code == error.code
            kept = type(error.seen) in (int, float, str, tuple, type(None))
            kept = kept or repr(error.seen) == "[1, 'a']"
            assert repr(made.seen) == repr(error.seen if kept else repr(error.seen))


def test_fields_that_were_added_are_kept() -> None:
    error = errors.DeviceOutOfMemoryError("no room")
    assert (error.wanted, error.free, error.total) == (None, None, None)
    error.wanted, error.free, error.total = 30, 20, 25
    error.add_note("while planning")
    again = pickle.loads(pickle.dumps(error))
    assert (again.wanted, again.free, again.total) == (30, 20, 25)
    assert again.__notes__ == ["while planning"]


def test_errors_of_real_calls_can_be_sent() -> None:
    key, cache = np.zeros((1, 1, 4), np.int8), np.zeros((1, 1, 1, 4), np.int8)
    calls = [
        {"slot_mapping": np.array([9])},
        {"slot_mapping": None},
        {"slot_mapping": [1]},
        {"slot_mapping": np.array([0]), "cache_mode": object()},
        {"slot_mapping": np.array([0]), "dtype": lambda: None},
        {"slot_mapping": np.array([0]), "soc": lambda: None},
        {"slot_mapping": np.array([0]), "num_threads": lambda: None},
        {"slot_mapping": np.array([0]), "backend": lambda: None},
    ]
    for changed in calls:
        with pytest.raises(kvcore.KVCoreError) as caught:
            kvcore.scatter_pa_kv_cache(key, cache, **changed)
        again = pickle.loads(pickle.dumps(caught.value))
        assert str(again) == str(caught.value)
        assert again.argument == caught.value.argument


def test_fail() -> None:
    with pytest.raises(errors.ParamInvalidError, match=r"^x\[2\]: expected 1, got 2$") as caught:
        errors.fail("x[2]", "1", 2)
    assert (caught.value.argument, caught.value.seen, caught.value.expected) == ("x", 2, "1")


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("wrong", [10**5000, -(10**5000), Unprintable()], ids=["+", "-", "object"])
@pytest.mark.parametrize(
    "name", ["num_threads", "dtype", "soc", "cache_mode", "scatter_mode", "strides"]
)
def test_values_that_cannot_be_printed_are_refused(name: str, wrong: object) -> None:
    key, cache = np.zeros((1, 1, 4), np.int8), np.zeros((1, 1, 1, 4), np.int8)
    given: dict[str, Any] = {name: wrong}
    if name == "strides":
        given = {"strides": [wrong], "offsets": [0], "scatter_mode": "Nct"}
    with pytest.raises(errors.ParamInvalidError, match=f"^{name}.* cannot be printed") as caught:
        kvcore.scatter_pa_kv_cache(key, cache, np.array([0]), **given)
    assert caught.value.argument == name


@pytest.mark.parametrize("wrong", [10**5000, Unprintable()], ids=["int", "object"])
def test_other_values_that_cannot_be_printed_are_refused(wrong: Any) -> None:
    new, past, one = np.zeros((1, 8), np.int8), np.zeros((1, 1, 4, 8), np.int8), np.array([1])
    calls: list[Callable[[], object]] = [
        lambda: kvcore.kv_cache_update(new, wrong, past, one, one),
        lambda: kvcore.layout.paged_nz_to_nd(np.zeros((1, 1, 4, 32), np.int8), wrong),
        lambda: kvcore.SoC(wrong),
        lambda: kvcore.set_num_threads(wrong),
    ]
    for call in calls:
        with pytest.raises(kvcore.KVCoreError):
            call()
