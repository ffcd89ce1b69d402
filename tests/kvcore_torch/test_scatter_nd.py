# SPDX-License-Identifier: Apache-2.0
"""npu_scatter_nd_update_ on tensors of any shape and strides, beside a plain loop over numpy.

The whole buffer is compared, so that a byte outside of the view counts as well.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from tensors import WITHOUT_TORCH

torch = pytest.importorskip("torch", reason=WITHOUT_TORCH)
from kvcore.torch.scatter_nd import plan_scatter_nd_update  # noqa: E402


def scatter(view: np.ndarray[Any, Any], indices: Any, updates: Any) -> None:
    """The operator by definition: row after row, negative indices skip."""
    lead = indices.shape[:-1]
    for place in np.ndindex(*lead):
        at = tuple(int(i) for i in indices[place])
        if min(at) >= 0:
            view[at] = updates[place]


def views(shape: tuple[int, ...], order: tuple[int, ...], padded: bool) -> Any:
    """(a buffer of ones and more, a view of that shape on it): axes stored in that order."""
    pad = 2 if padded else 0
    stored = [shape[axis] + pad for axis in order]
    buffer = np.arange(-int(np.prod(stored)), 0, dtype=np.int16).reshape(stored)
    view = buffer[(..., *[slice(1, -1) for _ in shape])] if padded else buffer
    return buffer, view.transpose([order.index(axis) for axis in range(len(shape))])


def tuples(sizes: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Every index tuple, last to first, then the middle one again and one that writes nothing."""
    every = list(itertools.product(*(range(n) for n in sizes)))[::-1]
    if not every:
        return np.empty((0, len(sizes)), np.int64)
    skipped = (*every[0][:-1], -1)
    return np.array([*every, every[len(every) // 2], skipped], np.int64)


def check(buffer: Any, view: Any, indices: Any, updates: Any) -> None:
    """Run the operator on a copy of the buffer and compare all of it with the loop's."""
    want = buffer.copy()
    offset = view.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]
    expected = np.ndarray(view.shape, view.dtype, want, offset, view.strides)
    before = want.copy()
    scatter(expected, indices, updates)
    target = torch.from_numpy(buffer)
    item = buffer.itemsize
    shown = target.as_strided(view.shape, [s // item for s in view.strides], offset // item)
    plan = plan_scatter_nd_update(shown, torch.from_numpy(indices), torch.from_numpy(updates))
    plan.run()
    assert np.array_equal(buffer, want), (view.shape, view.strides, indices.tolist())
    # What the call says it wrote covers every byte that changed, and lies inside of the view.
    base = target.data_ptr()
    changed = np.flatnonzero((before != want).reshape(-1)) * item
    found = [access.ranges for access in plan.touched()[1]]
    written = found[0] if found else np.empty((0, 2), np.int64)
    for at in changed.tolist():
        assert ((written[:, 0] - base <= at) & (at + item <= written[:, 1] - base)).any()
    assert int((written[:, 1] - written[:, 0]).sum()) <= view.nbytes


def cases(rank: int) -> Iterator[Any]:
    """Every shape, order of axes in memory, and whether the view is a part of its buffer."""
    sizes = (0, 1, 2, 3) if rank <= 3 else (1, 2)
    for shape in itertools.product(sizes, repeat=rank):
        for order in itertools.permutations(range(rank)):
            yield shape, order, True
            if rank <= 4:
                yield shape, order, False


@pytest.mark.parametrize(
    ("rank", "depth"), [(rank, depth) for rank in range(1, 6) for depth in range(1, rank + 1)]
)
def test_every_small_view(rank: int, depth: int) -> None:
    for shape, order, padded in cases(rank):
        buffer, view = views(shape, order, padded)
        indices = tuples(shape[:depth])
        updates = np.arange(1, 1 + len(indices) * int(np.prod(shape[depth:])), dtype=np.int16)
        check(buffer, view, indices, updates.reshape(len(indices), *shape[depth:]))


ODD = (0, 1, 5, 10**6, 2**40)


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (2, 1, 3), (1, 2, 1), (1, 1, 2, 2), (2, 1, 1)])
def test_strides_of_axes_of_one_mean_nothing(shape: tuple[int, ...]) -> None:
    ones = [axis for axis, n in enumerate(shape) if n == 1]
    for odd in itertools.product(ODD, repeat=len(ones)):
        buffer, view = views(shape, tuple(range(len(shape))), padded=True)
        steps = [s // 2 for s in view.strides]
        for axis, step in zip(ones, odd, strict=True):
            steps[axis] = step
        offset = (view.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]) // 2
        for depth in range(1, len(shape) + 1):
            whole = torch.from_numpy(buffer.copy())
            target = whole.as_strided(shape, steps, offset)
            indices = tuples(shape[:depth])
            updates = torch.arange(1, 1 + len(indices) * int(np.prod(shape[depth:]))).short()
            updates = updates.reshape(len(indices), *shape[depth:])
            want = buffer.copy()
            scatter(want[tuple(slice(1, -1) for _ in shape)], indices, updates.numpy())
            plan_scatter_nd_update(target, torch.from_numpy(indices), updates).run()
            assert np.array_equal(whole.numpy(), want), (shape, steps, depth)


@st.composite
def arguments(draw: Any) -> Any:
    """Target, indices and updates with strides of their own, indices in one to three axes."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=5)))
    depth = draw(st.integers(1, len(shape)))
    lead = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    made = []
    for wanted in (shape, (*lead, depth), (*lead, *shape[depth:])):
        order = tuple(draw(st.permutations(range(len(wanted)))))
        made.append(views(wanted, order, draw(st.booleans())))
    (buffer, view), (_, indices), (_, updates) = made
    numbers = np.random.default_rng(draw(st.integers(0, 99)))
    wide = indices.astype(draw(st.sampled_from([np.int32, np.int64])), order="K")
    for axis in range(depth):
        wide[..., axis] = numbers.integers(-1, shape[axis], lead)
    updates[...] = numbers.integers(1, 2**15, updates.shape)
    return buffer, view, wide, np.asarray(updates)


@given(arguments())
def test_any_strides(given_: Any) -> None:
    buffer, view, indices, updates = given_
    check(buffer, view, indices, updates)


@pytest.mark.parametrize("rows", [3, 5000])
def test_more_strided_axes_than_a_cache_has(rows: int) -> None:
    """Rows of five strided axes, tokens of three, with and without the interpreter's lock."""
    buffer, view = views((4, 2, 2, 2, 2, 2), (3, 1, 5, 0, 2, 4), padded=True)
    indices = np.random.default_rng(7).integers(0, 4, (2, rows, 1, 1))
    updates = np.arange(2 * rows * 32, dtype=np.int16).reshape(rows, 2, 1, 2, 2, 2, 2, 2)
    check(buffer, view, indices, updates.transpose(1, 0, 2, *range(3, 8)))


@pytest.mark.parametrize(
    ("shape", "indices", "message"),
    [
        ((4, 1, 3), [[[1, 0]], [[2, 1]]], "indices[1, 0, 1]: expected an index < 1 (axis 1 of"),
        ((0, 2), [[0]], "indices[0, 0]: expected an index < 0 (axis 0 of self), got 0"),
        ((2, 0, 1), [[1, 0]], "indices[0, 1]: expected an index < 0 (axis 1 of self), got 0"),
        ((2, 2), [2], "indices[0]: expected an index < 2 (axis 0 of self), got 2"),
        (
            (2, 2),
            [[0], [2**62]],
            f"indices[1, 0]: expected an index < 2 (axis 0 of self), got {2**62}",
        ),
        ((2, 2), [[-1, 2]], "indices[0, 1]: expected an index < 2 (axis 1 of self), got 2"),
    ],
)
def test_an_index_outside_writes_nothing(shape: Any, indices: Any, message: str) -> None:
    target = torch.zeros(shape)
    index = torch.tensor(indices)
    depth = index.shape[-1]
    updates = torch.ones(*index.shape[:-1], *shape[depth:])
    if 0 in shape[depth:]:
        return
    with pytest.raises(kvcore.ParamInvalidError, match=r"^" + re.escape(message)):
        plan_scatter_nd_update(target, index, updates).run()
    assert not target.any()


def test_an_index_is_read_at_each_run() -> None:
    target, index = torch.zeros(3, 4, 2), torch.zeros(2, 2, 2, dtype=torch.int64)
    updates = torch.ones(2, 2, 2).transpose(0, 1)
    plan = plan_scatter_nd_update(target, index.transpose(0, 1), updates)
    index[0], index[1] = torch.tensor([[2, 3], [-1, 0]]), torch.tensor([[0, 1], [-9, 3]])
    updates.fill_(5)
    plan.run()
    assert (target == 5).all(-1).nonzero().tolist() == [[0, 1], [2, 3]]
    assert int(target.count_nonzero()) == 4
    index[1, 0, 1] = 4
    with pytest.raises(kvcore.ParamInvalidError, match=re.escape("indices[0, 1, 1]: expected")):
        plan.run()
    assert int(target.count_nonzero()) == 4


def test_overlapping_elements_are_refused() -> None:
    target = torch.zeros(4).expand(3, 4)
    with pytest.raises(kvcore.ParamInvalidError, match=r"^self: expected elements with bytes of"):
        plan_scatter_nd_update(target, torch.tensor([[1]]), torch.ones(1, 4)).run()
