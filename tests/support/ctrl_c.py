# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, once or twice, to a program of its own in which an operation is held.

A program begins with `HEAD`.  It calls ``hold()`` where an operation runs, which prints "running",
waits for a line of input and prints "over"; each signal that reaches a handler prints "signal".
At its end ``left()`` names the threads of a device that still run.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import tempfile

__all__ = ["HEAD", "interrupt"]

HEAD = """
import asyncio, os, signal, sys, threading
import kvcore

install = signal.signal
def seen(handler):
    def handle(number, frame):
        os.write(1, b"signal\\n")
        handler(number, frame)
    return handle

def see_signals():
    signal.signal = lambda number, handler: install(number, seen(handler))

def hold():
    os.write(1, b"running\\n")
    sys.stdin.readline()
    os.write(1, b"over\\n")

def run(main):
    try:
        main()
    except KeyboardInterrupt:
        install(signal.SIGINT, signal.SIG_IGN)
        os.write(1, b"interrupted\\n")
    for thread in threading.enumerate():
        # (Ctrl-C may interrupt the start of a thread, which runs later or never)
        if thread.name.startswith("kvcore") and thread._started.wait(50):
            thread.join(50)

def left():
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("kvcore") and thread.is_alive()
    ]
"""


def interrupt(program: str, *words: str, times: int, seen: bool = True) -> tuple[list[str], str]:
    """Run a program with these words, and send SIGINT while an operation is held.

    times: how often; the next one when the one before was handled, where the program says so
           (``seen``).  Then the operation goes on.
    Returns the lines that it printed but "running" and "signal", and its standard error.  Its
    status must be 0.
    """
    with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(
        [sys.executable, "-c", HEAD + program, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdin is not None
        try:
            assert child.stdout.readline() == "running\n"
            lines: list[str] = []
            for _ in range(times):
                child.send_signal(signal.SIGINT)
                while seen and (not lines or lines[-1] != "signal\n"):
                    # (Python sees one that comes just before a system call when that is over)
                    while not select.select([child.stdout], [], [], 2)[0]:
                        child.send_signal(signal.SIGINT)
                    lines.append(child.stdout.readline())
                    assert lines[-1]
                lines = [line for line in lines if line != "signal\n"]
            child.stdin.write("\n")
            child.stdin.close()
            lines += child.stdout.read().splitlines(keepends=True)
            errors.seek(0)
            said = errors.read()
            assert child.wait(50) == 0, said
            return lines, said
        finally:
            child.kill()
