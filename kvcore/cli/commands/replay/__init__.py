# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay``: serve a request trace into real caches, and check what they hold."""

from __future__ import annotations

import argparse

from kvcore.cli.commands.replay.parsing import add_options, as_written, settle, written
from kvcore.cli.parser import Parser, Subparsers

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
Exit status: 0, whatever the answer is; 1 when a sample does not hold what was written, reports
differ, or the answer is not the one of --expect; 2 for a wrong
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
    """Read or generate the trace, serve it once or many times, print what came of it.

    An error that names a field of the options names the option as it is written instead.
    """
    from kvcore.errors import ParamInvalidError

    settle(namespace)
    try:
        return _run(namespace)
    except ParamInvalidError as error:
        raise as_written(error) from None


def _run(namespace: argparse.Namespace) -> int:
    from kvcore.errors import fail

    if namespace.compare is not None:
        from kvcore.cli.commands.replay.many import run_compare

        return run_compare(namespace)
    if namespace.ray is not None and namespace.sweep is None:
        fail("--ray", "a sweep to run there (--sweep)", "none")
    from kvcore.cli.commands.replay import serve

    if namespace.write_model is not None:
        return serve.write_model(namespace)
    offload = written(namespace, "offload")
    if not offload:
        return serve.run_caches(namespace)
    caches = written(namespace, "caches")
    if caches:
        fail(caches[0], f"no option of caches together with {offload[0]}", "both")
    source, requests = serve.read_requests(namespace)
    if namespace.sweep is not None:
        if namespace.expect is not None:
            fail("--expect", "one run; a sweep has an answer a point", "--sweep")
        from kvcore.cli.commands.replay.many import run_sweep

        return run_sweep(namespace, requests)
    return serve.run_offload(namespace, source, requests)
