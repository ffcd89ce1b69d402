# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: SLF001 -- a fault is planted inside of the connector
"""Plant faults in a serving engine's KV offload, and ask whether the machine reports each of them.

    kvcore emulate --soc A2 -- python examples/serving/plant.py --rounds 20

The engine is vLLM with vllm-ascend and its SimpleCPUOffloadConnector, unmodified but for the fault
itself, which is put in while the program runs.  Each round serves requests cold, again, and again
from the host.  Without a fault no round may give a report; with one, each round must give a race.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from models import build
from serve import Engine, prompts

import kvcore.emulator

#: So few that blocks whose store is taken for done are handed on within a round.
BLOCKS = 20


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def worker_of(engine: Engine) -> Any:
    """The connector's part that launches copies and asks whether they are done."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_handler


def done_at_once(worker: Any, *, stores: bool) -> Any:
    """A poll that takes every launched copy of one direction for done."""
    honest = worker._poll_stream_events

    def poll(is_store: bool) -> int:
        if is_store != stores:
            return int(honest(is_store))
        pending = (
            worker._pending_store_event_indices if stores else worker._pending_load_event_indices
        )
        return max(pending, default=-1)

    return replaced(worker, "_poll_stream_events", poll)


def a_load_without_its_wait(engine: Engine) -> Any:
    """Requests go on as soon as their load is launched."""
    return done_at_once(worker_of(engine), stores=False)


def a_block_freed_while_its_store_runs(engine: Engine) -> Any:
    """Blocks are free for others as soon as their store is launched."""
    return done_at_once(worker_of(engine), stores=True)


def a_store_that_starts_early(engine: Engine) -> Any:
    """Stores do not wait for the computation that writes what they read."""
    backend = worker_of(engine)._backend
    honest = backend.launch_copy

    def launch(*arguments: Any, wait_event: Any = None, **named: Any) -> None:
        honest(*arguments, **named)

    return replaced(backend, "launch_copy", launch)


def a_staging_buffer_rewritten_in_flight(engine: Engine) -> Any:
    """The next step's inputs are put where the last step's may still be read from."""
    return replaced(engine.runner, "prepare_inputs_event", None)


FAULTS = {
    function.__name__: function
    for function in (
        a_load_without_its_wait,
        a_block_freed_while_its_store_runs,
        a_store_that_starts_early,
        a_staging_buffer_rewritten_in_flight,
    )
}


def played(engine: Engine, number: int) -> list[Any]:
    """One round, of prompts that no connector knows yet; the reports that it gave."""
    import torch

    given = prompts(number)
    with kvcore.emulator.expected() as found:
        engine.tokens(given)
        engine.tokens(given)  # the steps in which the scheduler hears that stores are done
        engine.llm.reset_prefix_cache()
        engine.tokens(given)
        torch.npu.synchronize()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults in a serving engine's KV offload.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fault", choices=FAULTS, action="append")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tiny-models")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    given = argparse.Namespace(connector="simple", dtype="float16", graphs=False)
    engine = Engine(build("qwen3", arguments.folder, "float16"), given, BLOCKS)
    wrong = number = 0
    for name in [None, *(arguments.fault or FAULTS), None]:
        reported, words = 0, ""
        for _ in range(arguments.rounds):
            number += 1
            with FAULTS[name](engine) if name else contextlib.nullcontext():
                races = [one for one in played(engine, number) if one.kind == "racecheck"]
            reported += bool(races)
            words = words or (str(races[0].text) if races else "")
        said = f"{name or 'nothing planted'}: {reported} of {arguments.rounds} rounds"
        print(said, words, flush=True)
        wrong += reported != (arguments.rounds if name else 0)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
