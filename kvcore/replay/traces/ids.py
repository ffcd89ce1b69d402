# SPDX-License-Identifier: Apache-2.0
"""Traces of top-k ids: which tokens each layer's indexer chose, step by step.

A file is an ``.npz`` archive with one array ``ids``, int32 or int64 ``[steps, layers, topk]``: the
positions in the request that a step attends to, in any order, each once; -1 where there were
fewer.  ``layers`` are indexer layers, the ones that choose.  Other arrays are ignored.

A trace may come from anywhere, so the size an archive claims is checked before memory is taken,
pickles are never loaded, and every value is looked at.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.offload.checks import check_integer, check_path, read_indices
from kvcore.offload.rows.policy import make_books

__all__ = ["check_ids", "hit_rate", "read_ids", "read_member", "write_ids"]

MEMBER = "ids.npy"
MAX_BYTES = 8 * 2**30
MAX_ID = 2**31 - 2


def check_ids(ids: Any, where: str = "ids") -> NDArray[np.int32]:
    """The trace as int32 [steps, layers, topk], when it is one.

    Raises ParamNullError and ParamInvalidError: not three axes of at least one, not int32 or
    int64, an id below -1 or above 2^31 - 2, an id twice in a row.
    """
    ids = read_indices(where, ids, None)
    if ids.ndim != 3 or 0 in ids.shape:
        fail(where, "three axes [steps, layers, topk], none empty", f"shape {ids.shape}")
    narrow = np.empty(ids.shape, np.int32)
    for step, rows in enumerate(ids):
        bad = (rows < -1) | (rows > MAX_ID)
        if bad.any():
            layer, place = np.argwhere(bad)[0].tolist()
            expected = f"a position of at most {MAX_ID}, or -1"
            fail(f"{where}[{step}, {layer}, {place}]", expected, int(rows[layer, place]))
        ordered = np.sort(rows, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if twice.any():
            layer, place = np.argwhere(twice)[0].tolist()
            fail(f"{where}[{step}, {layer}]", "each id once", f"{ordered[layer, place]} twice")
        narrow[step] = rows
    return narrow


def write_ids(path: str | os.PathLike[str], ids: Any) -> None:
    """Write a trace, compressed; refuses what ``read_ids`` would.  The file is made at the end."""
    checked = check_ids(ids)
    target = Path(check_path("path", path))
    if not target.name:
        fail("path", "the path of a file", repr(str(path)))
    part = target.with_name(target.name + ".part")
    try:
        with part.open("wb") as file:
            np.savez_compressed(file, ids=checked)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def read_ids(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> NDArray[np.int32]:
    """int32 [steps, layers, topk] of a file.

    max_bytes: the most memory the array may claim.
    Raises ParamInvalidError naming the file and what is wrong with it.
    """
    check_integer("max_bytes", max_bytes, 1)
    name = check_path("path", path)
    try:
        with zipfile.ZipFile(name) as archive:
            if MEMBER not in archive.namelist():
                _refuse(name, "an array 'ids'", ", ".join(archive.namelist()[:8]) or "nothing")
            return check_ids(read_member(archive, name, MEMBER, max_bytes), f"{name}: ids")
    except zipfile.BadZipFile as error:
        _refuse(name, "an npz archive", str(error))
    except (OSError, EOFError, zlib.error, NotImplementedError, RuntimeError) as error:
        _refuse(name, "a readable npz archive", f"{type(error).__name__}: {error}")


def read_member(
    archive: zipfile.ZipFile, name: str, member: str, max_bytes: int, axes: int | None = 3
) -> NDArray[Any]:
    """An array of integers in an archive.

    name: of the file, for messages; max_bytes: that the array may claim; axes: how many it has,
    None: any number of them.
    Raises ParamInvalidError, and what zipfile raises for a member that cannot be read.
    """
    with archive.open(member) as file:
        return _read_array(name, file, max_bytes, axes)


def _read_array(name: str, member: Any, max_bytes: int, axes: int | None) -> NDArray[Any]:
    try:
        version = np.lib.format.read_magic(member)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran, dtype = read(member)
    except (
        ValueError, KeyError, SyntaxError, TypeError, RecursionError, MemoryError, TokenError,
    ) as error:  # fmt: skip
        _refuse(name, "an array in npy form", str(error))
    if dtype.newbyteorder("=") not in (np.int32, np.int64):
        _refuse(name, "ids of int32 or int64", str(dtype))
    whole = all(type(size) is int and size >= 0 for size in shape)
    wanted = math.prod(shape) * dtype.itemsize if whole else 0
    if not whole or axes not in (None, len(shape)) or wanted > max_bytes:
        form = "[steps, layers, topk]" if axes is not None else "an array"
        _refuse(name, f"{form} of at most {max_bytes} bytes", f"shape {shape}")
    data = bytearray()
    while len(data) < wanted:
        # In pieces: what a header claims need not be there.
        piece = member.read(min(2**24, wanted - len(data)))
        if not piece:
            _refuse(name, f"{wanted} bytes of ids", f"{len(data)}")
        data += piece
    flat = np.frombuffer(data, dtype)
    array = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _refuse(name: str, expected: str, seen: str) -> NoReturn:
    fail(name, expected, seen)


def hit_rate(
    ids: NDArray[np.int32],
    policy: str,
    capacity: int,
    *,
    ways: int | None = None,
    warmup: int = 0,
) -> float:
    """Share of the wanted ids that a pool held, over all layers and the steps past ``warmup``.

    ids: int32 [steps, layers, topk]; every layer has a pool of its own.
    """
    checked = check_ids(ids)
    steps, layers, topk = checked.shape
    check_integer("warmup", warmup, 0, steps - 1)
    hits = wanted = 0
    source, target = np.empty((2, topk), np.int32)
    for layer in range(layers):
        books = make_books(policy, capacity, int(checked[:, layer].max()) + 2, topk, ways)
        for step in range(steps):
            books.plan(checked[step, layer], source, target)
            if step >= warmup:
                hits += books.hits
                wanted += books.hits + books.misses
    return hits / wanted if wanted else 0.0
