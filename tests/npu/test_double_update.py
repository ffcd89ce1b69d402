# SPDX-License-Identifier: Apache-2.0
"""Updates of captured tasks and words that streams wait for: the double's rules and legal twins."""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_uint64, c_void_p

import numpy as np
import pytest
from double.asking import D2H, get, noticed
from double.direct import Double, pointer


def fill(double: Double, stream: int, address: int, value: int, count: int = 64) -> int:
    size = c_size_t(count)
    arguments = (pointer(address), size, value, size, pointer(stream))
    return int(double.rt("aclrtMemsetAsync", *arguments))


def bytes_at(double: Double, address: int, count: int = 64) -> set[int]:
    seen = np.zeros(count, np.uint8)
    host, size = c_void_p(seen.ctypes.data), c_size_t(count)
    double.ok(double.rt("aclrtMemcpy", host, size, pointer(address), size, D2H))
    return set(seen.tolist())


class Captured:
    """A graph with one group: a fill of 64 bytes with 1."""

    def __init__(self, double: Double) -> None:
        self.double = double
        self.address = double.malloc(64)
        self.stream, self.side = double.stream(), double.stream()
        double.ok(double.rt("aclmdlRICaptureBegin", pointer(self.stream), 1))
        double.ok(double.rt("aclmdlRICaptureTaskGrpBegin", pointer(self.stream)))
        double.ok(fill(double, self.stream, self.address, 1))
        stream = pointer(self.stream)
        self.group = get(double, "aclmdlRICaptureTaskGrpEnd", c_void_p, stream)
        self.graph = get(double, "aclmdlRICaptureEnd", c_void_p, stream)

    def begin(self) -> int:
        side, group = pointer(self.side), pointer(self.group)
        return int(self.double.rt("aclmdlRICaptureTaskUpdateBegin", side, group))

    def end(self) -> int:
        return int(self.double.rt("aclmdlRICaptureTaskUpdateEnd", pointer(self.side)))

    def replay(self) -> None:
        double = self.double
        graph, stream = pointer(self.graph), pointer(self.stream)
        double.ok(double.rt("aclmdlRIExecuteAsync", graph, stream))
        double.ok(double.sync(self.stream))

    def close(self) -> None:
        self.double.ok(self.double.sync(self.side))
        self.double.ok(self.double.rt("aclmdlRIDestroy", pointer(self.graph)))
        for stream in (self.stream, self.side):
            self.double.ok(self.double.rt("aclrtDestroyStream", pointer(stream)))
        assert self.double.live("task_group") == 0


def test_an_update_takes_effect_in_stream_order(double: Double) -> None:
    """Other memory and another value; nothing is run by the update itself."""
    captured = Captured(double)
    captured.replay()
    other = double.malloc(64)
    for target, value in ((captured.address, 5), (other, 9)):
        assert captured.begin() == 0
        assert fill(double, captured.side, target, value) == 0
        assert captured.end() == 0
        assert double.sync(captured.side) == 0
        assert value not in bytes_at(double, target)
        captured.replay()
        assert bytes_at(double, target) == {value}
    captured.close()
    double.ok(double.free(other))


@pytest.mark.parametrize("what", ["size", "operator", "more", "less"])
def test_an_update_that_changes_too_much(double: Double, what: str) -> None:
    """An error, no violation; the graph stays as it was and can be updated."""
    captured = Captured(double)
    assert captured.begin() == 0
    if what == "size":
        assert fill(double, captured.side, captured.address, 2, 32) == 107000
    elif what == "operator":
        word = pointer(captured.address), c_uint64(2), 0
        assert double.rt("aclrtValueWrite", *word, pointer(captured.side)) == 107000
    elif what == "more":
        assert fill(double, captured.side, captured.address, 2) == 0
        assert fill(double, captured.side, captured.address, 3) == 107000
    assert captured.end() == 107000
    assert "the graph stays as it was" in (double.message() or "")
    captured.replay()
    assert bytes_at(double, captured.address) == {1}
    assert captured.begin() == fill(double, captured.side, captured.address, 4) == 0
    assert captured.end() == 0
    assert double.sync(captured.side) == 0
    captured.replay()
    assert bytes_at(double, captured.address) == {4}
    captured.close()


def test_updates_begin_and_end_in_pairs(double: Double) -> None:
    captured = Captured(double)
    assert captured.end() != 0
    double.violations()
    assert captured.begin() == 0
    assert captured.begin() != 0
    noticed(double, "[1.8]", "updating already")
    # A stream that goes takes its update along.
    assert double.rt("aclrtDestroyStream", pointer(captured.side)) == 0
    captured.side = double.stream()
    assert captured.end() != 0
    noticed(double, "[1.8]", "not updating")
    side = pointer(captured.side)
    assert double.rt("aclmdlRICaptureTaskUpdateBegin", side, pointer(captured.graph)) == 107017
    double.violations()
    captured.close()


def test_a_stream_waits_for_a_word(double: Double) -> None:
    """Until another stream has written it, and what stands behind the wait comes after."""
    word, target = double.malloc(64), double.malloc(64)
    size = c_size_t(64)
    double.ok(double.rt("aclrtMemset", pointer(word), size, 0, size))
    waits, writes = double.stream(), double.stream()
    for value in (1, 2):
        wait = pointer(word), c_uint64(value), 1, pointer(waits)
        assert double.rt("aclrtValueWait", *wait) == 0
        assert fill(double, waits, target, value) == 0
        write = pointer(word), c_uint64(value), 0, pointer(writes)
        assert double.rt("aclrtValueWrite", *write) == 0
        assert double.sync(waits) == 0
        assert bytes_at(double, target) == {value}
    assert double.sync(writes) == 0


@pytest.mark.parametrize(
    ("kind", "value", "found"), [(0, 3, 4), (0, 3, 3), (1, 3, 3), (2, 6, 4), (3, 1, 2)]
)
def test_what_a_word_is_compared_for(double: Double, kind: int, value: int, found: int) -> None:
    """At least, equal, any bit, no bit in both."""
    word, stream = double.malloc(64), double.stream()
    write = pointer(word), c_uint64(found), 0, pointer(stream)
    assert double.rt("aclrtValueWrite", *write) == 0
    wait = pointer(word), c_uint64(value), kind, pointer(stream)
    assert double.rt("aclrtValueWait", *wait) == 0
    assert double.sync(stream) == 0


def test_words_that_are_none(double: Double) -> None:
    word, stream = double.malloc(64), double.stream()
    host = (ctypes.c_char * 64)()
    one = c_uint64(1)
    for address, flag in ((pointer(word + 4), 0), (host, 0), (pointer(word), 4)):
        assert double.rt("aclrtValueWait", address, one, flag, pointer(stream)) == 107000
        noticed(double, "[1.6]", "aclrtValueWait")
    assert double.rt("aclrtValueWrite", pointer(word), one, 1, pointer(stream)) == 107000
    noticed(double, "[1.6]", "flag 1")


def test_a_stream_that_waits_in_vain_can_be_dropped(double: Double) -> None:
    word, stream = double.malloc(64), double.stream()
    size = c_size_t(64)
    double.ok(double.rt("aclrtMemset", pointer(word), size, 0, size))
    wait = pointer(word), c_uint64(1), 1, pointer(stream)
    assert double.rt("aclrtValueWait", *wait) == 0
    assert double.rt("aclrtSynchronizeStreamWithTimeout", pointer(stream), 20) == 507046
    assert double.rt("aclrtDestroyStreamForce", pointer(stream)) == 0
