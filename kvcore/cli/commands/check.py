# SPDX-License-Identifier: Apache-2.0
"""``kvcore check``: which SoCs would run a call of these shapes and dtypes."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcore.cli import status
from kvcore.cli.calls import ORDERS, read_words
from kvcore.cli.log import Log, opened
from kvcore.cli.parser import Parser, Subparsers
from kvcore.cli.printing import say

if TYPE_CHECKING:
    from kvcore.ops.questions import Question

OPERATORS = (
    "scatter_pa_kv_cache",
    "scatter_pa_cache",
    "kv_cache_update",
    "gather_pa_kv_cache",
    "gather_selection_kv_cache",
)
SOCS = ("A2", "A3", "950")

DESCRIPTION = """\
Say which scenario a call is and which SoC would run it, from shapes and dtypes alone: given by
hand as words, or read from the lines of a log."""

EPILOG = """\
An array is SHAPE:DTYPE, any other argument its value:

  kvcore check key=4,8,128:float16 key_cache=64,16,8,128:float16 slot_mapping=4:int32 \\
      value=4,8,128:float16 value_cache=64,16,8,128:float16 --soc A2,A3

A line of a log is a call when a shape and a dtype stand behind the names of its arrays, as in
"key [4, 8, 128] torch.float16, keyCache: (64, 16, 8, 128) DT_FLOAT16 ...", or when it holds a list
of shapes and one of dtypes, with semicolons, as profilers write them; of equal calls the first is
shown. Attributes printed one by one, key.shape=torch.Size([4, 8, 128]) key.dtype=torch.float16, are
as good. The last line says how many lines hold a call and how many were not understood. Arguments
given together with --log hold for each of its lines. Arrays count as contiguous, and contents do
not count: a SoC may have rules about values too.

Exit status: 0 when every SoC asked for runs every call, with warnings or without; 1 when one
refuses; 2 for a wrong option, an argument left out, and a log without a call."""


@dataclass(frozen=True)
class Verdict:
    """One call: where it was read, how often, and what was answered.

    error: why no machine accepts it; it then stands in runs too.
    """

    line: int | None
    times: int
    scenario: int | None
    runs: dict[str, str | None]
    warnings: dict[str, tuple[str, ...]]
    error: str | None


def register(subparsers: Subparsers[Parser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "check",
        usage="kvcore check [NAME=VALUE ...] [--log FILE] [options]",
        help="which SoCs run a call of these shapes and dtypes",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words", metavar="NAME=VALUE", nargs="*", help="an argument of the operator"
    )
    parser.add_argument(
        "--log", metavar="FILE", help="lines to read calls from; - is standard input"
    )
    parser.add_argument(
        "--operator",
        metavar="NAME",
        choices=OPERATORS,
        default=OPERATORS[0],
        help="%(choices)s (default: %(default)s)",
    )
    parser.add_argument(
        "--order",
        metavar="HOW",
        choices=ORDERS,
        default=ORDERS[0],
        help="of lists in a log: aclnn (the operator's own), atb (key, value, caches, slots), or "
        "auto: atb in lines that name ReshapeAndCache (default: %(default)s)",
    )
    parser.add_argument(
        "--soc",
        metavar="NAMES",
        type=_socs,
        default=SOCS,
        help=f"those to ask, with commas between (default: {','.join(SOCS)})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, parser=parser)


def _socs(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in SOCS:
            raise argparse.ArgumentTypeError(
                f"expected names among {', '.join(SOCS)} with commas between, got {name!r}"
            )
    return tuple(name for name in SOCS if name in names)


def run(namespace: argparse.Namespace) -> int:
    """Read the calls, ask, print."""
    from kvcore.errors import fail
    from kvcore.ops.questions import QUESTIONS

    question = QUESTIONS[namespace.operator]
    words = read_words(namespace.words, question)
    log = None
    if namespace.log is None:
        if not words:
            fail("words", "arguments of the operator as NAME=VALUE, or --log FILE", "none")
        verdicts = [_verdict(question, None, 1, words, namespace.soc)]
    else:
        with opened(namespace.log) as lines:
            log = Log(lines, question, namespace.order)
            verdicts = _verdicts(log, question, words, namespace.soc)
        if not verdicts:
            expected = f"a line with shapes and dtypes of {namespace.operator}"
            fail("--log", expected, "none" if log.first_close is None else log.summary())
    if namespace.json:
        _print_json(namespace.operator, verdicts, log)
    else:
        for verdict in verdicts:
            _print_text(namespace.operator, verdict)
        if log is not None:
            say(log.summary())
    refused = any(reason is not None for v in verdicts for reason in v.runs.values())
    return status.FAILED if refused else status.OK


def _verdicts(
    log: Log, question: Question, words: dict[str, Any], socs: tuple[str, ...]
) -> list[Verdict]:
    """One of each call of a log, which repeats its calls layer by layer and step by step."""
    from kvcore.errors import ParamNullError

    found: dict[str, Verdict | str] = {}
    for line, call in log:
        key = repr(sorted((call := call | words).items()))
        known = found.get(key)
        if known is None:
            try:
                known = _verdict(question, line, 0, call, socs)
            except ParamNullError as error:  # the line does not name every array
                known = str(error)
        if isinstance(known, str):
            log.refuse(line, known)
        else:
            known = replace(known, times=known.times + 1)
        found[key] = known
    return [verdict for verdict in found.values() if not isinstance(verdict, str)]


def _verdict(
    question: Question,
    line: int | None,
    times: int,
    call: dict[str, Any],
    socs: tuple[str, ...],
) -> Verdict:
    """Raises ParamNullError when an argument is missing: that is no call yet."""
    from kvcore.errors import KVCoreError, ParamNullError

    try:
        answer = question.ask(call)
    except ParamNullError:
        raise
    except KVCoreError as error:
        # Without its arrays it is no call, whatever the other words are.
        try:
            question.ask({name: call[name] for name in question.arrays if name in call})
        except ParamNullError:
            raise
        except KVCoreError:
            pass
        return Verdict(line, times, None, dict.fromkeys(socs, str(error)), {}, str(error))
    return Verdict(
        line,
        times,
        answer.number,
        {soc: answer.runs[soc] for soc in socs},
        {soc: answer.warnings[soc] for soc in socs if soc in answer.warnings},
        None,
    )


def _print_text(operator: str, verdict: Verdict) -> None:
    from kvcore.ops.scenario import verdict_lines

    where = "" if verdict.line is None else f"line {verdict.line}: "
    what = "" if verdict.scenario is None else f", scenario {verdict.scenario}"
    often = "" if verdict.times == 1 else f", {verdict.times} times"
    say(f"{where}{operator}{what}{often}")
    if verdict.error is not None:
        say(f"refused without a SoC too: {verdict.error}")
        return
    for line in verdict_lines(verdict.runs, verdict.warnings):
        say(line)


def _print_json(operator: str, verdicts: list[Verdict], log: Log | None) -> None:
    calls = [
        {
            "line": v.line,
            "times": v.times,
            "scenario": v.scenario,
            "error": v.error,
            "runs": v.runs,
            "warnings": v.warnings,
        }
        for v in verdicts
    ]
    answer: dict[str, Any] = {"operator": operator, "calls": calls}
    if log is not None:
        answer["lines"] = {
            "read": log.lines,
            "calls": log.calls,
            "not_understood": log.not_understood,
            "close": log.close,
            "first_close": log.first_close,
        }
    say(json.dumps(answer, indent=2), lines=True)
