# SPDX-License-Identifier: Apache-2.0
"""Every pair of model and connector, each in a process of its own; a row of a table for each.

    python examples/serving/all.py

In the environment of docs/serving.md.  Ends with 1 if a check of any pair failed, or if the machine
reported anything.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

#: Options of serve.py.
RUNS = (
    *(
        ["--model", model, "--connector", connector]
        for model in ("qwen3", "llama", "deepseek-v2", "deepseek-v3.2")
        for connector in ("none", "simple", "offloading")
    ),
    ["--model", "qwen3", "--connector", "simple-lazy"],
    ["--model", "qwen3", "--connector", "recompute"],
    ["--model", "qwen3", "--connector", "none", "--preempt"],
    ["--model", "qwen3", "--connector", "recompute", "--preempt"],
)


def row(options: list[str], folder: Path) -> tuple[str, bool]:
    """A line of the table, and whether everything was right."""
    file = folder / "result.json"
    file.unlink(missing_ok=True)
    command = [
        str(Path(sys.executable).with_name("kvcore")), "emulate", "--soc", "A2", "--",
        sys.executable, str(HERE / "serve.py"), *options, "--folder", str(folder),
        "--result", str(file),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
    name = " ".join(word.removeprefix("--") for word in options if word not in ("--model",))
    if not file.exists():
        return f"| {name} | did not run | | | {last} |", False
    found: dict[str, Any] = json.loads(file.read_text())
    wrong = [check for check, faults in found["checks"].items() if faults]
    seconds = found["seconds"]
    times = f"{seconds['import']:.0f} + {seconds['engine']:.0f} + {seconds['rounds']:.0f} s"
    verdict = "no: " + "; ".join(wrong) if wrong else f"{len(found['checks'])} of them hold"
    line = f"| {name} | {verdict} | {times} | {found['peak_gib']:.1f} GiB | {last} |"
    return line, done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve every tiny model with every connector.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tiny-models")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    print("| | checks | import, engine, rounds | memory | |\n| --- | --- | --- | --- | --- |")
    right = True
    for options in RUNS:
        line, fine = row(options, arguments.folder)
        print(line, flush=True)
        right = right and fine
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
