# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay``: serve a request trace into real caches, and check what they hold."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from kvcore.cli import status
from kvcore.cli.parser import Parser, Subparsers, integer

if TYPE_CHECKING:
    from kvcore.offload import ModelShape, TraceRequest

GENERATED_REQUESTS = 100
DEFAULT_CACHE_MIB = 256

DESCRIPTION = """\
Serve the requests of a trace: continuous batching over a block pool with prefix reuse, chunked
prefill, one token a step in decode. The tokens' keys and values are written into paged caches
with scatter_pa_kv_cache, and samples of them are read back through the block tables."""

EPILOG = """\
A trace is JSON lines, one request each: timestamp (ms), input_length and output_length (tokens),
hash_ids (one id per 512 tokens of the input). Arrival times only order the requests.
Exit status: 0; 1 when a sample does not hold what was written; 2 for a wrong option or trace;
130 after Ctrl-C (the table so far is printed)."""


def register(subparsers: Subparsers[Parser]) -> None:
    """Add the command."""
    from kvcore.offload.caches import LAYOUTS
    from kvcore.offload.models import (
        DTYPE_NAMES,
        MAX_HEAD_SIZE,
        MAX_HEADS,
        MAX_LAYERS,
        MODELS,
    )

    parser = subparsers.add_parser(
        "replay",
        usage="kvcore replay [TRACE] [options]",
        help="serve a request trace into real caches and check them",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "trace",
        metavar="TRACE",
        nargs="?",
        help="a trace, or - for standard input (default: a seeded generator of similar shape)",
    )
    parser.add_argument(
        "--requests",
        metavar="N",
        type=integer(1, 10**7),
        help=f"the first N only (default: all of a trace, {GENERATED_REQUESTS} generated)",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=integer(0, 2**64 - 1),
        default=0,
        help="of the generator, the tokens' bytes and the samples (default: %(default)s)",
    )

    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="NAME",
        default="tiny",
        help=f"{', '.join(MODELS)}, or a .toml or config.json file (default: %(default)s);"
        " the figures below replace the model's",
    )
    for option, low, high, meaning in (
        ("--layers", 1, MAX_LAYERS, "layers, each with caches of its own"),
        ("--num-heads", 1, MAX_HEADS, "key-value heads"),
        ("--head-size", 1, MAX_HEAD_SIZE, "elements of a key head"),
        ("--value-head-size", 0, MAX_HEAD_SIZE, "elements of a value head; 0: no value lane"),
    ):
        model.add_argument(option, metavar="N", type=integer(low, high), help=meaning)
    model.add_argument("--dtype", metavar="NAME", choices=DTYPE_NAMES, help="%(choices)s")

    cache = parser.add_argument_group("cache")
    size = cache.add_mutually_exclusive_group()
    size.add_argument("--blocks", metavar="N", type=integer(1, 2**40), help="blocks of the pool")
    size.add_argument(
        "--cache-mib",
        metavar="N",
        type=integer(1, 2**40),
        help=f"size of all caches together (default: {DEFAULT_CACHE_MIB})",
    )
    cache.add_argument(
        "--block-size",
        metavar="N",
        type=integer(1, 65_536),
        default=128,
        help="tokens of a block (default: %(default)s)",
    )
    cache.add_argument(
        "--layout",
        metavar="NAME",
        choices=list(LAYOUTS),
        default="Norm",
        help="%(choices)s (default: %(default)s)",
    )

    serving = parser.add_argument_group("serving")
    serving.add_argument(
        "--max-batch",
        metavar="N",
        type=integer(1, 4096),
        default=32,
        help="requests that run at a time (default: %(default)s)",
    )
    serving.add_argument(
        "--chunk",
        metavar="N",
        type=integer(1, 2**20),
        default=2048,
        help="prompt tokens computed in one step (default: %(default)s)",
    )
    serving.add_argument(
        "--threads", metavar="N", type=integer(1, 1024), help="threads of the operator"
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--verify-samples",
        metavar="N",
        type=integer(0, 10**9),
        default=1000,
        help="tokens to read back and compare (default: %(default)s)",
    )
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    output.add_argument(
        "--progress",
        metavar="HOW",
        choices=("auto", "bar", "lines", "none"),
        default="auto",
        help="%(choices)s, on standard error; auto: a bar on a terminal, else none"
        " (default: %(default)s)",
    )
    parser.set_defaults(run=run, parser=parser)


def run(namespace: argparse.Namespace) -> int:
    """Read or generate the trace, serve it, print what came of it."""
    from kvcore.cli.interrupt import Interrupt
    from kvcore.cli.progress import progress_of
    from kvcore.offload import Replay

    shape = _shape(namespace)
    num_blocks = _num_blocks(namespace, shape)
    source, requests = _requests(namespace)
    replay = Replay(
        requests,
        shape,
        num_blocks=num_blocks,
        block_size=namespace.block_size,
        layout=namespace.layout,
        max_batch=namespace.max_batch,
        chunk_tokens=namespace.chunk,
        seed=namespace.seed,
        verify_samples=namespace.verify_samples,
        num_threads=namespace.threads,
    )
    with Interrupt() as interrupt, progress_of(namespace.progress) as progress:
        report = replay.run(stop=interrupt.is_set, progress=progress)

    if namespace.json:
        print(json.dumps({"trace": source, "seed": namespace.seed, **report.to_dict()}, indent=2))
    else:
        from kvcore.cli.replay_table import print_report

        print_report(report, source)
    for mismatch in report.mismatches[:5]:
        print(f"kvcore replay: {mismatch}", file=sys.stderr)
    if not report.ok:
        return status.FAILED
    return status.INTERRUPTED if report.interrupted else status.OK


def _shape(namespace: argparse.Namespace) -> ModelShape:
    from dataclasses import replace

    from kvcore.offload import ModelProfile

    model = ModelProfile.find(namespace.model)
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
    from kvcore.errors import fail
    from kvcore.offload import generate_trace, read_trace

    if namespace.trace is None:
        number = namespace.requests or GENERATED_REQUESTS
        return f"generated, seed {namespace.seed}", list(
            generate_trace(number, seed=namespace.seed)
        )
    if namespace.trace == "-":
        requests = read_trace(sys.stdin.buffer, limit=namespace.requests)
    else:
        requests = read_trace(namespace.trace, limit=namespace.requests)
    if not requests:
        fail(namespace.trace, "at least one request", "none")
    return namespace.trace, requests
