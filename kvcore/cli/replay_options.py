# SPDX-License-Identifier: Apache-2.0
"""The options of ``kvcore replay``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from kvcore.cli.parser import Parser, integer
from kvcore.errors import fail

__all__ = ["CACHE_ONLY", "OFFLOAD_ONLY", "add_options", "files_read", "given", "refuse_outputs"]

GENERATED_REQUESTS = 100
DEFAULT_CACHE_MIB = 256
DEFAULT_BATCH = 32

#: Options that belong to one kind of replay: attribute -> option.
CACHE_ONLY = {
    "layers": "--layers", "num_heads": "--num-heads", "head_size": "--head-size",
    "value_head_size": "--value-head-size", "dtype": "--dtype", "layout": "--layout",
    "cache_mib": "--cache-mib", "threads": "--threads",
}  # fmt: skip
OFFLOAD_ONLY = {
    "policy": "--policy", "pool": "--pool", "fidelity": "--fidelity", "device": "--device",
    "prefill_tokens_per_s": "--prefill-tokens-per-s", "prefill": "--prefill",
    "drafts": "--drafts", "accept": "--accept", "write_policy": "--write-policy",
    "arrivals": "--arrivals", "abort_share": "--abort-share",
    "sample_requests": "--sample-requests", "sample_layers": "--sample-layers",
    "perfetto": "--trace", "html": "--html", "sweep": "--sweep",
}  # fmt: skip

#: Options that name a file to write.
OUTPUTS = {"json": "--json", "perfetto": "--trace", "html": "--html"}


def given(namespace: argparse.Namespace, names: dict[str, str]) -> list[str]:
    """Those of the options that were written."""
    return [option for name, option in names.items() if getattr(namespace, name) is not None]


def files_read(namespace: argparse.Namespace) -> tuple[str, ...]:
    """Those that the options name."""
    named = (namespace.model, namespace.device)
    files = [name for name in named if name is not None and name.endswith((".toml", ".json"))]
    return (*files, *([] if namespace.trace is None else [namespace.trace]))


def refuse_outputs(namespace: argparse.Namespace) -> None:
    """Raise for options that name a file beside ``--compare``, which writes none."""
    for option in given(namespace, OUTPUTS):
        fail(option, "no file to write beside --compare", "one")


def number(low: float, high: float) -> Callable[[str], float]:
    """A type for ``add_argument``: numbers from ``low`` to ``high``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"expected a number from {low:g} to {high:g}, got {text[:40]!r}"
            )
        return value

    return parse


def add_options(parser: Parser) -> None:
    """Add all of them."""
    _add_input(parser)
    _add_cache(parser)
    _add_serving(parser)
    _add_offload(parser)
    _add_output(parser)
    _add_many(parser)


def _add_input(parser: Parser) -> None:
    from kvcore.replay.models.profile import (
        DTYPE_NAMES,
        MAX_HEAD_SIZE,
        MAX_HEADS,
        MAX_LAYERS,
        MODELS,
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
        help="of the generators, the tokens' bytes and the samples (default: %(default)s)",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="NAME",
        help=f"{', '.join(MODELS)}, or a .toml or config.json file (default: tiny; tiny-sparse"
        " with offload); the figures below replace the model's",
    )
    for option, low, high, meaning in (
        ("--layers", 1, MAX_LAYERS, "layers, each with caches of its own"),
        ("--num-heads", 1, MAX_HEADS, "key-value heads"),
        ("--head-size", 1, MAX_HEAD_SIZE, "elements of a key head"),
        ("--value-head-size", 0, MAX_HEAD_SIZE, "elements of a value head; 0: no value lane"),
    ):
        model.add_argument(option, metavar="N", type=integer(low, high), help=meaning)
    model.add_argument("--dtype", metavar="NAME", choices=DTYPE_NAMES, help="%(choices)s")


def _add_cache(parser: Parser) -> None:
    from kvcore.replay.serving.caches import LAYOUTS

    cache = parser.add_argument_group("cache")
    size = cache.add_mutually_exclusive_group()
    size.add_argument(
        "--blocks",
        metavar="N",
        type=integer(1, 2**40),
        help="blocks of the pool; with offload the host's (default there: 65536, full: 8192)",
    )
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
        "--layout", metavar="NAME", choices=list(LAYOUTS), help="%(choices)s (default: Norm)"
    )


def _add_serving(parser: Parser) -> None:
    serving = parser.add_argument_group("serving")
    serving.add_argument(
        "--batch",
        "--max-batch",
        dest="batch",
        metavar="N",
        type=integer(1, 4096),
        default=DEFAULT_BATCH,
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


def _add_offload(parser: Parser) -> None:
    offload = parser.add_argument_group(
        "offload", "Any of these, and the full cache is on the host: docs/replay.md, Offload."
    )
    offload.add_argument(
        "--policy",
        metavar="NAME",
        help="of the pool on the device: previous, lru, fifo, arc (default: lru)",
    )
    offload.add_argument(
        "--pool",
        metavar="N",
        type=integer(1, 2**28 - 1),
        help="entries of a request and indexer group (default: 4 times what a step selects)",
    )
    offload.add_argument(
        "--fidelity",
        metavar="NAME",
        choices=("full", "sampled"),
        help="full: every row planned, every byte moved; sampled: those of some requests and"
        " layers (default: full when it is short)",
    )
    offload.add_argument("--device", metavar="NAME", help="A2, A3, 950 or a .toml (default: A3)")
    offload.add_argument(
        "--prefill-tokens-per-s", metavar="N", type=number(1e-3, 1e12), help="of the device"
    )
    offload.add_argument(
        "--prefill",
        metavar="HOW",
        choices=("none", "device"),
        help="none: another device computes the prompts (default: device)",
    )
    offload.add_argument(
        "--drafts", metavar="N", type=integer(0, 63), help="draft tokens a step (default: 0)"
    )
    offload.add_argument(
        "--accept",
        metavar="P",
        type=number(0, 1),
        help="chance that a draft stands when those before it do (default: 0.8)",
    )
    offload.add_argument(
        "--write-policy", metavar="NAME", help="write_through, write_back (default: write_through)"
    )
    offload.add_argument(
        "--arrivals",
        metavar="HOW",
        choices=("order", "time"),
        help="order: all requests are there at once; time: each at its timestamp (default: order)",
    )
    offload.add_argument(
        "--abort-share",
        metavar="P",
        type=number(0, 1),
        help="share of requests aborted somewhere in their output (default: 0)",
    )
    offload.add_argument(
        "--sample-requests", metavar="N", type=integer(1, 2**31), help="real ones (default: 64)"
    )
    offload.add_argument(
        "--sample-layers", metavar="N", type=integer(1, 2**31), help="real ones (default: 2)"
    )


def _add_output(parser: Parser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--verify-samples",
        metavar="N",
        type=integer(0, 10**9),
        default=1000,
        help="tokens to read back and compare (default: %(default)s)",
    )
    output.add_argument(
        "--json", metavar="FILE", help="write the figures as JSON; - prints them, and no table"
    )
    output.add_argument(
        "--trace", dest="perfetto", metavar="FILE", help="write a trace for Perfetto (offload)"
    )
    output.add_argument(
        "--html", metavar="FILE", help="write one page with plots (offload; the extra 'report')"
    )
    output.add_argument(
        "--progress",
        metavar="HOW",
        choices=("auto", "bar", "lines", "none"),
        default="auto",
        help="%(choices)s, on standard error; auto: a bar on a terminal, else none"
        " (default: %(default)s)",
    )


def _add_many(parser: Parser) -> None:
    many = parser.add_argument_group("several runs")
    many.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="print where two JSON reports differ; status 1 beyond the tolerance",
    )
    many.add_argument(
        "--tolerance",
        metavar="P",
        type=number(0, 1e9),
        default=0.05,
        help="largest relative difference (default: %(default)s)",
    )
    many.add_argument(
        "--sweep",
        nargs="+",
        metavar="NAME=A,B",
        help="run a grid: policy=lru,fifo pool=8192,16384 batch=16,32 (also drafts, device, "
        "write_policy, seed)",
    )
    many.add_argument(
        "--results",
        metavar="DIR",
        default="kvcore-sweep",
        help="where a sweep keeps its reports, and finds those it has (default: %(default)s)",
    )
    many.add_argument(
        "--jobs", metavar="N", type=integer(1, 1024), help="processes of a sweep (default: cores)"
    )
    many.add_argument("--ray", metavar="ADDRESS", help="run the sweep on this Ray cluster instead")
