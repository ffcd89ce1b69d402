# SPDX-License-Identifier: Apache-2.0
"""Ids of one's own: what requests of a real run chose, for the requests of a replay.

A file is an ``.npz`` archive with an array ``ids_<n>`` for each recorded request, int32 or int64
``[steps, layers, topk]`` as `kvcore.replay.read_ids` has it, and ``context_<n>``, the tokens that
its first step saw.  ``layers`` are the layers that choose.  Each step sees one token more than the
one before.

A request of the replay takes the recording nearest to it in context, when that is within a tenth.
Where its context is the smaller of the two, ids that it does not have are replaced by others drawn
at random.  Behind the recording's end, and for requests that no recording is near to, ids are
made with the turnover that was measured in the file (`turnover_of`).
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import fail
from kvcore.offload.checks import check_path
from kvcore.replay.traces.ids import MAX_BYTES, check_ids, read_member
from kvcore.replay.traces.made_ids import DEFAULTS, IdSource, MadeIds
from kvcore.replay.traces.synthetic_ids import TurnoverIds

if TYPE_CHECKING:
    from kvcore.replay.models.profile import ModelProfile

__all__ = ["NEAR", "RecordedIds", "Recording", "parse_turnover", "read_recordings", "turnover_of"]

#: Of a request's context: how far the recording's may be from it.
NEAR = 0.1
MOST_REQUESTS = 100_000
NAME = re.compile(r"ids_(\d+)\.npy")


@dataclass(frozen=True, slots=True)
class Recording:
    """One request's ids, int32 [steps, layers, topk], and the tokens that its first step saw."""

    context: int
    ids: NDArray[np.int32]


class RecordedIds:
    """Where the ids of a replay's requests come from, for requests that a file has ids of.

    recordings: of one count of layers and one top-k; turnover: for what they do not cover.
    """

    def __init__(self, recordings: Sequence[Recording], turnover: MadeIds) -> None:
        self.recordings: tuple[Recording, ...] = tuple(
            sorted(recordings, key=lambda recording: recording.context)
        )
        self.turnover: MadeIds = turnover

    def nearest(self, context: int) -> Recording | None:
        """The recording nearest to a context, when it is near enough."""
        found = min(self.recordings, key=lambda recording: abs(recording.context - context))
        return found if abs(found.context - context) <= NEAR * context else None

    def of_request(self, context: int, group: int, topk: int, seed: int) -> IdSource:
        """The ids of one request, whose first step sees ``context`` tokens, in one group."""
        recording = self.nearest(context)
        if recording is None:
            return self.turnover.of_request(context, group, topk, seed)
        made = TurnoverIds(topk, seed=seed, **self.turnover.values)
        return _Replayed(recording.ids[:, group], made, seed)

    def to_dict(self) -> dict[str, Any]:
        """What the file has, and the turnover measured in it."""
        return {
            "kind": "recorded", "requests": len(self.recordings),
            "contexts": [recording.context for recording in self.recordings],
            "turnover": self.turnover.to_dict(),
        }  # fmt: skip


class _Replayed:
    """The ids of a recording, step by step, then those of a generator that goes on from them."""

    def __init__(self, ids: NDArray[np.int32], made: TurnoverIds, seed: int) -> None:
        self._ids, self._made, self._step = ids, made, 0
        self._draw = np.random.default_rng([0x7265, seed])
        self.recorded = True

    def next(self, num_tokens: int) -> NDArray[np.int32]:
        """int32 [topk] of a step that sees ``num_tokens`` tokens."""
        self.recorded = self._step < len(self._ids)
        if not self.recorded:
            return self._made.next(num_tokens)
        ids: NDArray[np.int32] = self._ids[self._step].copy()
        self._step += 1
        topk = len(ids)
        if num_tokens <= topk:
            ids[:] = -1
            ids[:num_tokens] = np.arange(num_tokens)
        else:
            kept = ids[(ids >= 0) & (ids < num_tokens)]
            # (fewer than the top-k in the file, or beyond this request's context)
            if len(kept) < topk:
                free = np.setdiff1d(np.arange(num_tokens, dtype=np.int32), kept)
                more = self._draw.permutation(free)[: topk - len(kept)]
                ids = np.concatenate([kept, more]).astype(np.int32)
        self._made.go_on_from(ids[ids >= 0])
        return ids


def turnover_of(recordings: Sequence[Recording]) -> MadeIds:
    """The turnover of a file: overlap, reuse and mean distance of a `TurnoverIds` like it.

    Counted over every layer and step past the first whose context is larger than the top-k: the
    share of the last selection that stays, and of what is new to it the share that was chosen
    before and dropped, with the mean number of steps since.  Where nothing can be counted the
    generator's defaults stand.
    """
    kept = wanted = fresh = back = 0
    distances = 0.0
    for recording in recordings:
        steps, layers, topk = recording.ids.shape
        for layer in range(layers):
            seen: dict[int, int] = {}
            last: set[int] = set()
            for step in range(steps):
                now = {int(x) for x in recording.ids[step, layer] if x >= 0}
                if step and recording.context + step > topk:
                    stay = now & last
                    kept, wanted = kept + len(stay), wanted + len(last)
                    new = now - last
                    returned = [step - seen[x] - 1 for x in new if x in seen]
                    fresh, back = fresh + len(new), back + len(returned)
                    distances += sum(returned)
                seen.update(dict.fromkeys(now, step))
                last = now
    values = dict(DEFAULTS["turnover"])
    if wanted:
        values["overlap"] = kept / wanted
        values["reuse"] = back / fresh if fresh else 0.0
        values["distance"] = max(1.0, distances / back) if back else 1.0
    return MadeIds("turnover", values, "assumed", "counted in the file of ids; made for the rest")


def parse_turnover(text: str) -> MadeIds:
    """A generator from ``overlap=0.6,reuse=0.9,distance=5``; what is left out has its default.

    Raises ParamInvalidError naming what is wrong.
    """
    values: dict[str, float] = {}
    for part in text.split(","):
        name, found, value = part.strip().partition("=")
        if not found or name not in DEFAULTS["turnover"] or name in values:
            fail("turnover", "overlap=,reuse=,distance=, each once", repr(part))
        try:
            values[name] = float(value)
        except ValueError:
            fail("turnover", f"{name} as a number", repr(value))
    return MadeIds("turnover", values, "assumed", "given by the caller")


def read_recordings(
    path: str | os.PathLike[str], model: ModelProfile, *, max_bytes: int = MAX_BYTES
) -> RecordedIds:
    """The recordings of a file, for a model.

    max_bytes: the most memory that its arrays may claim together.
    Raises ParamInvalidError naming the file, the array and what is wrong with it: a shape that is
    not the model's, an id beyond the context, a context that is missing.
    """
    name = check_path("ids", path)
    try:
        status = Path(name).stat()
        found = _read(name, status.st_mtime_ns, status.st_size, max_bytes)
    except zipfile.BadZipFile as error:
        fail(name, "an npz archive", str(error))
    except (OSError, EOFError, zlib.error, NotImplementedError, RuntimeError) as error:
        fail(name, "a readable npz archive", f"{type(error).__name__}: {error}")
    shape = (len(model.groups), model.topk)
    for place, recording in found.items():
        if recording.ids.shape[1:] != shape:
            expected = f"[steps, {shape[0]}, {shape[1]}]: {model.name}'s layers that choose, top-k"
            fail(f"{name}: ids_{place}", expected, f"shape {recording.ids.shape}")
    recordings = tuple(found.values())
    return RecordedIds(recordings, turnover_of(recordings))


@lru_cache(maxsize=1)
def _read(name: str, _changed: int, _size: int, max_bytes: int) -> dict[str, Recording]:
    """The recordings by number; a file that has not changed is read once."""
    found: dict[str, Recording] = {}
    with zipfile.ZipFile(name) as archive:
        members = set(archive.namelist())
        numbers = sorted(
            (match[1] for match in map(NAME.fullmatch, members) if match), key=lambda n: (len(n), n)
        )
        if not numbers or len(numbers) > MOST_REQUESTS:
            seen = ", ".join(sorted(members)[:8]) or "nothing"
            fail(name, f"arrays ids_<n>, of at most {MOST_REQUESTS:,} requests", seen)
        for number in numbers:
            if f"context_{number}.npy" not in members:
                fail(name, f"a context_{number} for ids_{number}", "none")
            ids = read_member(archive, name, f"ids_{number}.npy", max_bytes)
            max_bytes -= ids.nbytes
            context = _context(archive, name, number)
            checked = check_ids(ids, f"{name}: ids_{number}")
            _refuse_beyond(f"{name}: ids_{number}", checked, context)
            found[number] = Recording(context, checked)
    return found


def _context(archive: zipfile.ZipFile, name: str, number: str) -> int:
    array = read_member(archive, name, f"context_{number}.npy", 1024, axes=None)
    value = int(array.reshape(-1)[0]) if array.size == 1 else -1
    if not 0 < value < 2**31:
        expected = f"one number of tokens from 1 to {2**31 - 1}"
        fail(f"{name}: context_{number}", expected, f"{array.size} values" if value < 0 else value)
    return value


def _refuse_beyond(where: str, ids: NDArray[np.int32], context: int) -> None:
    """Raise for an id that its step's context does not have."""
    sees = context + np.arange(len(ids))
    most = ids.max(axis=(1, 2))
    bad = np.flatnonzero(most >= sees)
    if len(bad):
        step = int(bad[0])
        expected = f"ids below {int(sees[step])}, the tokens that the step sees"
        fail(f"{where}[{step}]", expected, int(most[step]))
