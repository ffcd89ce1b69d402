# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay``: serve a request trace into real caches, and check what they hold."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvcore.cli import status
from kvcore.cli.parser import Parser, Subparsers
from kvcore.cli.printing import tell
from kvcore.cli.replay_options import (
    CACHE_ONLY,
    DEFAULT_CACHE_MIB,
    GENERATED_REQUESTS,
    OFFLOAD_ONLY,
    add_options,
    files_read,
    given,
)

if TYPE_CHECKING:
    from kvcore.replay import ModelShape, TraceRequest

DESCRIPTION = """\
Serve the requests of a trace: continuous batching over a block pool with prefix reuse, chunked
prefill, one token a step in decode. The tokens' keys and values are written into paged caches
with scatter_pa_kv_cache, and samples of them are read back through the block tables.
With --policy, or any option of offload, the full cache is on the host, and a device's model
clock says what a step takes."""

EPILOG = """\
A trace is JSON lines, one request each: timestamp (ms), input_length and output_length (tokens),
hash_ids (one id per 512 tokens of the input). Arrival times only order the requests, but for
--arrivals time.
Exit status: 0; 1 when a sample does not hold what was written, or reports differ; 2 for a wrong
option or trace, and for what cannot be written; 130 after Ctrl-C (what is done is printed and
written)."""


def register(subparsers: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "replay",
        usage="kvcore replay [TRACE] [options]",
        help="serve a request trace into real caches and check them",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(namespace: argparse.Namespace) -> int:
    """Read or generate the trace, serve it, print what came of it."""
    if namespace.compare is not None:
        from kvcore.cli.replay_many import run_compare

        return run_compare(namespace)
    offload = given(namespace, OFFLOAD_ONLY)
    if not offload:
        _refuse_ray(namespace)
        return _run_caches(namespace)
    from kvcore.errors import fail

    cache = given(namespace, CACHE_ONLY)
    if cache:
        fail(cache[0], f"no option of caches beside {offload[0]}", "both")
    source, requests = _requests(namespace)
    if namespace.sweep is not None:
        from kvcore.cli.replay_many import run_sweep

        return run_sweep(namespace, requests)
    _refuse_ray(namespace)
    from kvcore.cli.replay_offload import run_offload

    return run_offload(namespace, source, requests)


def _refuse_ray(namespace: argparse.Namespace) -> None:
    if namespace.ray is not None:
        from kvcore.errors import fail

        fail("--ray", "a sweep to run there (--sweep)", "none")


def _run_caches(namespace: argparse.Namespace) -> int:
    from kvcore.cli.interrupt import Interrupt
    from kvcore.cli.outputs import refuse_unwritable, write_json
    from kvcore.cli.progress import progress_of
    from kvcore.replay import Replay

    refuse_unwritable(namespace.json, reads=files_read(namespace))
    shape = _shape(namespace)
    num_blocks = _num_blocks(namespace, shape)
    source, requests = _requests(namespace)
    replay = Replay(
        requests,
        shape,
        num_blocks=num_blocks,
        block_size=namespace.block_size,
        layout=namespace.layout or "Norm",
        max_batch=namespace.batch,
        chunk_tokens=namespace.chunk,
        seed=namespace.seed,
        verify_samples=namespace.verify_samples,
        num_threads=namespace.threads,
    )
    with Interrupt() as interrupt, progress_of(namespace.progress) as progress:
        report = replay.run(stop=interrupt.is_set, progress=progress)

    if namespace.json != "-":  # first, so that it is seen though the disk be full
        from kvcore.cli.replay_table import print_report

        print_report(report, source)
    if namespace.json is not None:
        figures = {"trace": source, "seed": namespace.seed, **report.to_dict()}
        write_json(namespace.json, figures)
    for mismatch in report.mismatches[:5]:
        tell(f"kvcore replay: {mismatch}")
    if not report.ok:
        return status.FAILED
    return status.INTERRUPTED if report.interrupted else status.OK


def _shape(namespace: argparse.Namespace) -> ModelShape:
    from dataclasses import replace

    from kvcore.replay import ModelProfile

    model = ModelProfile.find(namespace.model or "tiny")
    changes = {
        field: getattr(namespace, option)
        for field, option in (
            ("num_layers", "layers"), ("num_heads", "num_heads"), ("head_size", "head_size"),
            ("value_head_size", "value_head_size"), ("dtype", "dtype"),
        )
        if getattr(namespace, option) is not None
    }  # fmt: skip
    if not changes:
        return model.shape
    return replace(model.shape, name=f"{model.name}, changed", **changes)


def _num_blocks(namespace: argparse.Namespace, shape: ModelShape) -> int:
    from kvcore.errors import fail

    if namespace.blocks is not None:
        return int(namespace.blocks)
    mebibytes = namespace.cache_mib or DEFAULT_CACHE_MIB
    block_bytes = namespace.block_size * shape.token_bytes
    num_blocks = mebibytes * 2**20 // block_bytes
    if not num_blocks:
        fail("--cache-mib", f"at least one block of {block_bytes} bytes", f"{mebibytes} MiB")
    return int(num_blocks)


def _requests(namespace: argparse.Namespace) -> tuple[str, list[TraceRequest]]:
    from kvcore.cli.log import standard_input
    from kvcore.errors import fail
    from kvcore.replay import generate_trace, read_trace
    from kvcore.replay.traces.reader import bounded_lines

    if namespace.trace is None:
        number = namespace.requests or GENERATED_REQUESTS
        return f"generated, seed {namespace.seed}", list(
            generate_trace(number, seed=namespace.seed)
        )
    if namespace.trace == "-":
        lines = bounded_lines(standard_input().readline)
        requests = read_trace(lines, limit=namespace.requests)
    else:
        requests = read_trace(namespace.trace, limit=namespace.requests)
    if not requests:
        fail(namespace.trace, "at least one request", "none")
    return namespace.trace, requests
