# SPDX-License-Identifier: Apache-2.0
"""Each rule of the C interface, broken in the backend: the double or the bytes must tell."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from double.direct import Double
from mutating import Break, Patch, put, seen_under, swap, tensor, words, wrap
from npu_fixtures import clean as clean
from npu_work import amiss

from kvcore.npu.call import (
    arrays,
    call,
    copies,
    gather,
    launch,
    memory,
    owners,
    scatter,
    selection,
    tensors,
    update,
    values,
)
from kvcore.npu.cann import library
from kvcore.strides import dense_strides

MUTATIONS: dict[str, Break] = {}


def mutation(function: Break) -> Break:
    MUTATIONS[function.__name__] = function
    return function


# ---------------------------------------------------------------- 5.1, 5.2: two phases


def _run(self: Any, words: Any, room: Any, stream: int, mutant: str) -> None:
    size, executor = ctypes.c_uint64(0), ctypes.c_void_p()
    self._phase_one(*words, ctypes.byref(size), ctypes.byref(executor))
    workspace = room.take("workspace", size.value)
    if mutant == "no workspace":
        workspace = None
    self._phase_two(workspace, size.value, executor, stream)
    if mutant == "twice":
        self._phase_two(workspace, size.value, executor, stream)
    if mutant == "destroy":
        self._cann.aclDestroyAclOpExecutor(executor)


def running(mutant: str) -> Callable[..., None]:
    return lambda self, words, room, stream: _run(self, words, room, stream, mutant)


@mutation
def an_executor_runs_twice(patch: Patch) -> None:
    patch.setattr(launch.PreparedCall, "_run", running("twice"))


@mutation
def an_executor_is_destroyed_behind_phase_two(patch: Patch) -> None:
    patch.setattr(launch.PreparedCall, "_run", running("destroy"))


@mutation
def no_workspace_is_given(patch: Patch) -> None:
    patch.setattr(launch.PreparedCall, "_run", running("no workspace"))


@mutation
def phase_two_is_left_out(patch: Patch) -> None:
    def around(self: Any, words: Any, room: Any, stream: int) -> None:
        size, executor = ctypes.c_uint64(0), ctypes.c_void_p()
        self._phase_one(*words, ctypes.byref(size), ctypes.byref(executor))

    patch.setattr(launch.PreparedCall, "_run", around)


@mutation
def a_workspace_is_freed_at_once(patch: Patch) -> None:
    wrap(
        patch,
        launch.PreparedCall,
        "_where",
        lambda original, self: (original(self)[0], lambda block: block.free()),
    )


@mutation
def a_workspace_is_too_small(patch: Patch) -> None:
    def around(original: Any, self: Any, purpose: str, nbytes: int) -> Any:
        return self.new(16) if purpose == "workspace" else original(self, purpose, nbytes)

    wrap(patch, memory.Room, "take", around)


@mutation
def an_outgrown_workspace_is_freed_at_once(patch: Patch) -> None:
    patch.setattr(memory.Pool, "retire", lambda self, blocks: [block.free() for block in blocks])


@mutation
def the_record_takes_the_stream_first(patch: Patch) -> None:
    def around(original: Any, self: Any, name: str) -> Any:
        if name != "aclrtRecordEvent":
            return original(self, name)
        function = original(self, name)
        swapped = lambda event, stream: function(stream, event)  # noqa: E731
        setattr(self, name, swapped)
        return swapped

    wrap(patch, library.Cann, "__getattr__", around)


# ---------------------------------------------------------------- 5.3: tensors


@mutation
def tensors_are_never_destroyed(patch: Patch) -> None:
    patch.setattr(tensors.TensorHandles, "__exit__", lambda self, *rest: None)


@mutation
def tensors_are_destroyed_twice(patch: Patch) -> None:
    def around(original: Any, self: Any, *rest: Any) -> None:
        made = list(self._made)
        original(self, *rest)
        self._made = made
        original(self, *rest)

    wrap(patch, tensors.TensorHandles, "__exit__", around)


@mutation
def tensors_are_destroyed_between_the_phases(patch: Patch) -> None:
    open_handles: list[Any] = []
    wrap(
        patch,
        tensors.TensorHandles,
        "__enter__",
        lambda original, self: open_handles.append(self) or original(self),
    )

    def around(original: Any, self: Any, purpose: str, nbytes: int) -> Any:
        if purpose == "workspace":
            open_handles.pop().__exit__(None, None, None)
        return original(self, purpose, nbytes)

    wrap(patch, memory.Room, "take", around)


@mutation
def offsets_are_in_bytes(patch: Patch) -> None:
    tensor(patch, lambda k, dims, steps, at, whole, p: (k, dims, steps, at * k.itemsize, whole, p))


@mutation
def strides_are_in_bytes(patch: Patch) -> None:
    tensor(
        patch,
        lambda k, dims, steps, at, whole, p: (
            k,
            dims,
            [n * k.itemsize for n in steps],
            at,
            whole,
            p,
        ),
    )


@mutation
def a_storage_is_the_view_s_own_shape(patch: Patch) -> None:
    tensor(patch, lambda k, dims, steps, at, whole, p: (k, dims, steps, at, dims, p))


@mutation
def a_storage_is_larger_than_its_memory(patch: Patch) -> None:
    tensor(
        patch, lambda k, dims, steps, at, whole, p: (k, dims, steps, at, [9 * n for n in whole], p)
    )


@mutation
def an_offset_is_lost(patch: Patch) -> None:
    tensor(patch, lambda k, dims, steps, at, whole, p: (k, dims, steps, 0, whole, p))


@mutation
def an_address_is_not_aligned(patch: Patch) -> None:
    tensor(patch, lambda k, dims, steps, at, whole, p: (k, dims, steps, at, whole, p + 2))


@mutation
def strides_are_lost(patch: Patch) -> None:
    def change(k: Any, dims: Any, steps: Any, at: int, whole: Any, p: int) -> tuple[Any, ...]:
        dense = [n // k.itemsize for n in dense_strides(dims, k.itemsize)]
        return k, dims, dense, at, whole, p

    tensor(patch, change)


@mutation
def tensors_have_the_format_nz(patch: Patch) -> None:
    patch.setattr(tensors, "ACL_FORMAT_ND", 29)


@mutation
def a_type_is_another_of_its_size(patch: Patch) -> None:
    kinds = {"float16": "uint16", "int8": "uint8", "int32": "uint32"}

    def change(k: Any, *rest: Any) -> tuple[Any, ...]:
        return (arrays.BY_NAME[kinds.get(k.name, k.name)], *rest)

    tensor(patch, change)


@mutation
def strings_end_before_phase_two(patch: Patch) -> None:
    buffers: list[Any] = []

    def around(original: Any, self: Any, *given: Any) -> list[Any]:
        words = original(self, *given)
        for i, word in enumerate(words):
            if isinstance(word, bytes):
                buffers.append(ctypes.create_string_buffer(word))
                words[i] = ctypes.cast(buffers[-1], ctypes.c_char_p)
        return list(words)

    wrap(patch, scatter.ScatterCall, "phase_one", around)

    def take(original: Any, self: Any, purpose: str, nbytes: int) -> Any:
        if purpose == "workspace":
            while buffers:
                ctypes.memset(buffers.pop(), ord("x"), 3)
        return original(self, purpose, nbytes)

    wrap(patch, memory.Room, "take", take)


# ---------------------------------------------------------------- 1.10, 5.4, 5.5: arguments


@mutation
def the_value_comes_before_the_slots(patch: Patch) -> None:
    words(patch, scatter.ScatterCall, swap(2, 3))


@mutation
def lengths_and_offsets_of_compression_change_places(patch: Patch) -> None:
    words(patch, scatter.ScatterCall, swap(5, 6))


@mutation
def the_modes_change_places(patch: Patch) -> None:
    words(patch, scatter.ScatterCall, swap(8, 9))


@mutation
def the_mode_is_always_norm(patch: Patch) -> None:
    words(patch, scatter.ScatterCall, put(8, b"Norm"))


@mutation
def the_mode_is_in_lower_case(patch: Patch) -> None:
    words(patch, scatter.ScatterCall, put(8, b"norm"))


@mutation
def pitches_are_left_out_in_nct(patch: Patch) -> None:
    words(patch, scatter.ScatterCall, put(10, None))


@mutation
def pitches_and_first_elements_change_places(patch: Patch) -> None:
    words(patch, scatter.ScatterCall, swap(10, 11))


@mutation
def no_value_is_null(patch: Patch) -> None:
    words(patch, update.UpdateCall, lambda found: (put(3, None)(found), put(4, None)(found)))


@mutation
def lengths_are_never_totals(patch: Patch) -> None:
    words(patch, gather.GatherCall, put(8, False))


@mutation
def tables_and_lengths_change_places(patch: Patch) -> None:
    words(patch, gather.GatherCall, swap(2, 3))


@mutation
def no_rope_is_null(patch: Patch) -> None:
    words(patch, selection.SelectionCall, lambda found: (put(0, None)(found), put(5, None)(found)))


@mutation
def the_block_size_is_one(patch: Patch) -> None:
    words(patch, selection.SelectionCall, put(10, 1))


@mutation
def the_lengths_of_both_sides_change_places(patch: Patch) -> None:
    words(patch, selection.SelectionCall, swap(8, 9))


@mutation
def a_layer_is_always_the_first(patch: Patch) -> None:
    wrap(
        patch,
        arrays.Argument,
        "seen_as",
        lambda original, self, shape, strides, offset=0: original(self, shape, strides, 0),
    )


# ---------------------------------------------------------------- 5.7: strides


@mutation
def keys_are_passed_as_views(patch: Patch) -> None:
    wrap(
        patch,
        call.OperatorCall,
        "settle_strides",
        lambda original, self, free: original(self, free | {"key": 2, "value": 2}),
    )


def first_rows(axes: list[Any], item: int) -> list[Any]:
    shape = [size for size, _ in axes]
    return list(zip(shape, dense_strides(shape, item), strict=True))


@mutation
def copies_are_of_the_first_rows(patch: Patch) -> None:
    wrap(
        patch,
        copies,
        "coalesce",
        lambda original, axes, item: original(first_rows(list(axes), item), item),
    )


# ---------------------------------------------------------------- values, streams, threads


@mutation
def values_on_the_host_are_not_checked(patch: Patch) -> None:
    patch.setattr(values.Values, "check", lambda self: None)


@mutation
def values_are_read_before_the_stream_has_passed(patch: Patch) -> None:
    def around(original: Any, self: Any, cann: Any, *rest: Any) -> None:
        patch.setitem(vars(cann), "aclrtSynchronizeStream", lambda stream: 0)
        original(self, cann, *rest)

    wrap(patch, values.Values, "read_device", around)


@mutation
def host_values_go_to_memory_in_use(patch: Patch) -> None:
    wrap(
        patch,
        memory.Room,
        "new",
        lambda original, self, nbytes: self.pool.take("slots", nbytes),
    )


@mutation
def a_thread_is_given_no_device(patch: Patch) -> None:
    patch.setattr(library.Cann, "set_device", lambda self, device_id: None)


@mutation
def another_stream_is_used(patch: Patch) -> None:
    wrap(patch, owners.BufferOwner, "stream", lambda original, self: 0xDEAD0)


@mutation
def two_phases_of_two_executors(patch: Patch) -> None:
    def around(original: Any, self: Any, words: Any, room: Any, stream: int) -> None:
        size, executor = ctypes.c_uint64(0), ctypes.c_void_p()
        self._phase_one(*words, ctypes.byref(size), ctypes.byref(executor))
        original(self, words, room, stream)

    wrap(patch, launch.PreparedCall, "_run", around)


@mutation
def a_finalize_behind_each_call(patch: Patch) -> None:
    def around(original: Any, self: Any, *given: Any) -> None:
        original(self, *given)
        self._cann.aclFinalize()

    wrap(patch, launch.PreparedCall, "_run", around)


@mutation
def a_workspace_is_another_call_s_copy(patch: Patch) -> None:
    def around(original: Any, self: Any, purpose: str, nbytes: int) -> Any:
        return original(self, "one", nbytes)

    wrap(patch, memory.Pool, "take", around)


# ---------------------------------------------------------------- the test


def test_nothing_is_amiss_without_a_mutation(clean: Double) -> None:
    assert amiss(clean) == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_noticed(clean: Double, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = seen_under(monkeypatch, MUTATIONS[name], lambda: amiss(clean))
    assert found, f"{name} went unnoticed"
