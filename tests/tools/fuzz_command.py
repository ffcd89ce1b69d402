# SPDX-License-Identifier: Apache-2.0
"""Every sub-command with hostile words and files.

    python tests/tools/fuzz_command.py [N] [SEED]

Each of N cases is a command line made of options and values, right and wrong, beside files of
random bytes, numbers without end, values within each other, wrong types, folders, links that lead
nowhere and devices.  Whatever it is, the command ends with a status of the table in
docs/command_line.md, prints no traceback and no character that a terminal would obey, and leaves no
file of its own under another name.  A case is repeated with ``N = 1`` and its own seed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcore.cli import main, status
from kvcore.replay.options import flags_of, options_of

STATUSES = {status.OK, status.FAILED, status.USAGE, status.INTERRUPTED, status.BROKEN_PIPE}
TRACE = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [0, 1]}
CALL = {
    "scatter_pa_kv_cache": "key=4,8,128:float16 key_cache=64,16,8,128:float16 slot_mapping=4:int32 "
    "value=4,8,128:float16 value_cache=64,16,8,128:float16 cache_mode=Norm scatter_mode=None "
    "strides=1,1 offsets=0,0",
    "scatter_pa_cache": "key=4,8,128:float16 key_cache=64,16,8,128:float16 slot_mapping=4:int32",
    "kv_cache_update": "new_kv=5,32:float16 layer_id=0 past=1,2,8,32:float16 "
    "token_offset=2:int32 seq_len=2:int32",
    "gather_pa_kv_cache": "key_cache=8,16,2,32:float16 value_cache=8,16,2,32:float16 "
    "block_tables=2,4:int32 seq_lens=2:int32 key=9,2,32:float16 value=9,2,32:float16 "
    "is_seq_lens_cumsum=false",
    "gather_selection_kv_cache": "selection_k_rope=64,128,64:float16 "
    "selection_kv_cache=64,128,512:float16 selection_kv_block_table=2,32:int32 "
    "selection_kv_block_status=2,1,1,3:int32 selection_topk_indices=2,1,1,2:int32 "
    "full_k_rope=9,128,64:float16 full_kv_cache=9,128,512:float16 full_kv_block_table=2,4:int32 "
    "full_kv_actual_seq=2:int32 full_q_actual_seq=2:int32 selection_topk_block_size=64",
}
MODEL = {
    "model_type": "dsa", "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
    "index_topk": 64, "index_head_dim": 32,
}  # fmt: skip
REPORT = {"steps": 3, "x": {"y": [1, 2.5, None, "z"]}, "hit_rate": 0.5}
HISTORY = {"cases": {"norm-1": {"ratios": {"copyto": 1.5}}}}
TOML = 'name = "x"\n[layers]\nvalue = 3\nbasis = "assumed"\nsource = "s"\n'
NUMBERS = ["0", "1", "-1", "3", "64", "9" * 30, "9" * 400, "9" * 5000, str(2**63), "1e999", "nan",
           "-inf", "0x10", "1_0", "٣", " 7 ", "", "0.5", "1e-320"]  # fmt: skip
TEXTS = [
    "", "-", "--", "=", ",", ":", "x" * 3000, "\x1b[2J\x9b", "é\u202e", "\udcff", "%s%n", "../..",
    "none", "None", "lru", "A3", "{", "a=b=c", "'", "[4, 8]",
]  # fmt: skip
OPTIONS = {
    "info": ["--json"],
    "bench": ["--json", "--list", "--seconds", "--save", "--compare"],
    "check": ["--log", "--operator", "--order", "--soc", "--json"],
    "emulate": ["--soc", "--devices", "--memory", "--check"],
    "predict": ["--json", "--traces"],
    "calibrate": ["--json", "--write"],
    # (a sweep's processes would outlast a case; --max-batch is --batch)
    "replay": [
        flag
        for name, declared in options_of()
        for flag in flags_of(name, declared)
        if declared.written and flag not in ("--jobs", "--max-batch")
    ],
}  # fmt: skip
CHOICES = {
    "--operator": list(CALL), "--order": ["auto", "aclnn", "atb"], "--soc": ["A2", "950,A3"],
    "--policy": ["previous", "lru", "fifo", "arc"], "--fidelity": ["full", "sampled"],
    "--device": ["A2", "A3", "950"], "--prefill": ["none", "device"], "--layout": ["PA_NZ", "NHSD"],
    "--write-policy": ["write_through", "write_back"], "--arrivals": ["order", "time"],
    "--model": ["tiny", "tiny-sparse", "qwen3-8b"], "--progress": ["lines", "none", "bar"],
    "--sweep": ["pool=512", "policy=lru,fifo", "seed=1,1", "batch=x", "pool=" + "9" * 5000],
    "--dtype": ["int8", "bfloat16", "float4_e2m1"],
}  # fmt: skip
#: Seconds.
PATIENCE = 120
#: Options whose large values are legal and only take long.
SLOW = {"--requests", "--verify-samples", "--sample-requests", "--drafts", "--seconds"}
QUICK = [n for n in NUMBERS if n not in ("64", "3", " 7 ", "1_0", "٣")]
FILES = {"--log", "--save", "--compare", "--model", "--device", "--json", "--trace", "--html",
         "--results", "--traces", "--write"}  # fmt: skip


def value(draw: random.Random, depth: int = 0) -> Any:
    """Something that JSON has."""
    kind = draw.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return draw.choice([None, True, False])
    if kind == 1:
        return draw.choice([0, 1, -1, 2**31, 2**63, 10**400, 10**30, 10**308, -(10**309)])
    if kind == 2:
        return draw.choice([0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf")])
    if kind <= 5:
        return draw.choice(TEXTS).replace("\udcff", "")
    if kind == 6:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice([*TRACE, *REPORT, "", "\x1b"]): value(draw, depth + 1) for _ in range(3)}


def text_of(draw: random.Random) -> str:
    """A file's text: right, nearly right, or not at all."""
    start: Any = draw.choice([TRACE, REPORT, MODEL, HISTORY])
    kind = draw.randrange(10)
    if kind <= 2:
        return json.dumps(start)
    if kind <= 4:
        changed = dict(start)
        for key in draw.sample(list(changed), draw.randrange(1, len(changed) + 1)):
            if draw.random() < 0.3:
                del changed[key]
            else:
                changed[key] = value(draw)
        return json.dumps(changed)
    if kind == 5:
        return draw.choice(["[", '{"a":', "x=[", "[[", "("]) * draw.choice(
            [3, 60, 70, 2000, 30_000]
        )
    if kind == 6:
        text = list(json.dumps(start) * 2)
        for _ in range(draw.randrange(1, 6)):
            text[draw.randrange(len(text))] = draw.choice(['"', "{", "}", "\n", "9" * 5000, "\x1b"])
        return "".join(text)
    if kind == 7:
        return TOML.replace("3", draw.choice(NUMBERS)).replace("x", draw.choice(["x", "'", '"']))
    if kind == 8:
        words = " ".join(
            CALL["scatter_pa_kv_cache"].replace("=", " [").replace(":", "] ").split(" ")
        )
        return "\n".join(
            [words, "\x1b]0;x\x07", words.replace("4", draw.choice(NUMBERS)), "key [4]"]
        )
    return draw.choice(["", "\n" * 99, "x" * 200_000, "0" * 6000, "\ufeff{}", "null", "\x00"])


def make_files(draw: random.Random) -> list[str]:
    """Files of every kind in the folder one is in; their names."""
    for name in ("a", "b.json", "c.toml", "d.jsonl", "log"):
        Path(name).write_text(text_of(draw), errors="replace")
    Path("random.json").write_bytes(draw.randbytes(draw.randrange(2000)))
    Path("pool=512.json").write_text(text_of(draw), errors="replace")
    Path("good.jsonl").write_text(json.dumps(TRACE))
    Path("folder.json").mkdir()
    Path("loop.toml").symlink_to("loop.toml")
    Path("nowhere").symlink_to("no/such/file")
    return [*os.listdir(), "none", "none/such", ".", "/dev/null", "/dev/full", "/dev/zero",
            "/proc/self/mem", "\x1b[2Jx", "x" * 300, "a/b"]  # fmt: skip


def words_of(draw: random.Random, files: list[str]) -> list[str]:
    """A command line."""
    command = draw.choice([*OPTIONS, "check", "replay", "replay", draw.choice(TEXTS)])
    if command not in OPTIONS:
        return [command, *draw.sample(TEXTS, draw.randrange(3))]
    words = [command]
    if command == "check":
        operator = draw.choice(list(CALL))
        words += ["--operator", operator]
        for word in CALL[operator].split():
            name, _, rest = word.partition("=")
            chance = draw.random()
            if chance < 0.1:
                continue
            if chance < 0.3:
                old = draw.choice([*rest.replace(":", ",").split(","), ":"])
                rest = rest.replace(old, draw.choice([*NUMBERS, *TEXTS]), 1)
            words.append(f"{name}={rest}")
    if command == "replay" and draw.random() < 0.7:
        words.append(draw.choice([*files, "good.jsonl"]))
    if command in ("predict", "calibrate"):
        # What ships takes seconds, so it is not asked for.
        words.append(draw.choice([file for file in files if file not in ("", "none")]))
    if command == "bench":
        words += ["norm-1", "--seconds", "0.001"]
    for option in draw.sample(OPTIONS[command], draw.randrange(min(6, len(OPTIONS[command]) + 1))):
        words.append(option)
        if option in ("--json", "--list") and command != "replay":
            continue
        for _ in range(2 if option == "--compare" and command == "replay" else 1):
            pool = list(CHOICES.get(option, ())) * 4
            pool += files * 2 if option in FILES else []
            pool += QUICK if option in SLOW else NUMBERS
            words.append(draw.choice([*pool, *TEXTS]))
    if command == "replay":
        # Small, whatever else was asked for.
        words += ["--requests", "1", "--verify-samples", "5"]
    return [word.replace("\x00", "") for word in words]


class InThisProcess:
    """Stands for a sweep's processes, which take a second each."""

    def __init__(self, function: Any, count: int, *shared: Any) -> None:
        self.function, self.shared, self.busy, self.full = function, shared, 0, False

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def begin(self, point: Any) -> None:
        self.point, self.busy = point, 1

    def finished(self, seconds: float) -> Any:
        self.busy = 0
        yield self.point, self.function(self.point, *self.shared)


def judge(words: list[str], code: int, out: str, err: str) -> str | None:
    """What is wrong with how a command ended."""
    if code not in STATUSES:
        return f"status {code}"
    for text in (out, err):
        bad = [c for c in text if not c.isprintable() and c != "\n"]
        if bad:
            return f"printed {bad[0]!r}"
        if "Traceback" in text:
            return "a traceback"
    left = [name for name in os.listdir() if name.endswith(".part")]
    return f"left {left[0]}" if left else None


def one(seed: int, run: Callable[[list[str]], int]) -> tuple[list[str], int, str | None]:
    """Run one case; its words, its status and what is wrong."""
    draw = random.Random(seed)
    here, folder = Path.cwd(), tempfile.mkdtemp(prefix="fuzz-command-")
    os.chdir(folder)
    words: list[str] = []
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    stdin = io.TextIOWrapper(io.BytesIO(text_of(draw).encode("utf-8", "replace")))
    before, sys.stdin = sys.stdin, stdin
    try:
        words = words_of(draw, make_files(draw))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(words)
            out.flush()
            err.flush()
        said = [s.buffer.getvalue().decode() for s in (out, err)]  # type: ignore[attr-defined]
        return words, code, judge(words, code, *said)
    except Exception:
        return words, status.FAULT, traceback.format_exc()
    finally:
        sys.stdin = before
        os.chdir(here)
        shutil.rmtree(folder, ignore_errors=True)


def fuzz(cases: int, seed: int) -> int:
    """Run them; prints those that ended wrongly, and how many ended how."""
    from kvcore.replay import sweep

    sweep.Workers = InThisProcess  # type: ignore[assignment,misc]
    # What asks for more memory than this is told so; the machine has others to serve.
    limit = 6 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    counts: Counter[int] = Counter()
    wrong = 0
    for number in range(seed, seed + cases):
        # A case takes milliseconds; one that hangs shows where, and ends the program.
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        words, code, fault = one(number, main)
        faulthandler.cancel_dump_traceback_later()
        counts[code] += 1
        if fault is not None:
            wrong += 1
            print(f"seed {number}: {[word[:80] for word in words]}: {fault}", flush=True)
    told = ", ".join(f"{count} with {code}" for code, count in sorted(counts.items()))
    print(f"{cases} cases from seed {seed}: {told}; {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(fuzz(*(int(word) for word in [*sys.argv[1:], "1000", "1"][:2])))
