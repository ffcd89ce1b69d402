# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcore.npu.selftest``: run each operator on this machine's NPU and check its bytes.

Each operator runs on the device and on the CPU, and every byte is compared.  The output is made
to be pasted into a report: it names libraries, versions, the SoC and each result, no user data.
Ends with 0 when all agree, 1 when something does not, 2 when there is nothing to run on or the
report cannot be written, and else as every command does: 70 for a fault of kvcore's own, 130 for
Ctrl-C, 141 when the reader has gone.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.errors import KVCoreError
from kvcore.npu.call.device_arrays import DeviceArray
from kvcore.npu.cann import library, report
from kvcore.npu.selftest_cases import SelftestCase, cases_of

__all__ = ["main"]

OK, DIFFERS, CANNOT_RUN = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the self test; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcore.npu.selftest",
        description="Run every operator on the NPU and on the CPU, compare every byte, and print "
        "a report to paste.",
        epilog="Exit status: 0 when all agree; 1 when something does not; 2 when it cannot run.",
    )
    parser.add_argument("--device", type=int, default=0, help="device number (default 0)")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    options = parser.parse_args(arguments)
    kvcore = _package()
    print(f"kvcore {kvcore.__version__}, self test of the aclnn backend")
    for line in _lines(report.details()):
        print(_printable(line))
    reason = kvcore.backends.why_not("aclnn")
    if reason is None and options.device not in range(count := library.current().device_count()):
        reason = f"--device: expected a device from 0 to {count - 1}, got {options.device}"
    if reason is not None:
        print(f"\nCANNOT RUN: {_printable(reason)}")
        return CANNOT_RUN
    print()
    counts = {"PASS": 0, "FAIL": 0, "MISSING": 0}
    for case in cases_of(library.current().soc().name):
        if options.only in case.name:
            verdict, text = _verdict(case, options.device)
            counts[verdict] += 1
            proves = f" [{case.proves}]" if case.proves else ""
            print(f"{verdict:8}{case.name}{proves}{_printable(text)}", flush=True)
    if not library.current().copies_in_two_dimensions:
        print("\nthis CANN copies strided arrays a row at a time")
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return OK if counts["PASS"] and not counts["FAIL"] else DIFFERS


def _package() -> Any:
    # A program, run by itself: the one place here that stands above the operators.
    return importlib.import_module("kvcore")


def _lines(facts: Mapping[str, Any], indent: str = "  ") -> list[str]:
    found = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            found += [f"{indent}{name}:", *_lines(value, indent + "  ")]
        elif isinstance(value, list):
            found += [f"{indent}{name}:", *(f"{indent}  {item}" for item in value)]
        else:
            found.append(f"{indent}{name}: {value}")
    return found


def _verdict(case: SelftestCase, device_id: int) -> tuple[str, str]:
    try:
        return _compare(case, *_run(case, device_id))
    except KVCoreError as error:
        missing = "is not in this CANN" in str(error)
        return ("MISSING" if missing else "FAIL"), f": {type(error).__name__}: {error}"


def _run(case: SelftestCase, device_id: int) -> tuple[dict[str, Any], dict[str, Any], Any, Any]:
    operator = getattr(_package(), case.operator)
    wanted = _copied(case.arrays)
    returned = operator(**wanted, **case.options)
    made: dict[int, DeviceArray] = {}
    placed = {name: _placed(array, made, device_id) for name, array in case.arrays.items()}
    try:
        answer = operator(**placed, **case.options)
        seen = {name: placed[name].to_host() for name in case.arrays}
        if isinstance(answer, DeviceArray) and case.operator == "gather_selection_kv_cache":
            lengths = answer.to_host()
            answer.free()
            return wanted, seen, returned, lengths
    finally:
        try:
            with library.current().on_device(device_id, giving_back=True):
                library.current().aclrtSynchronizeDevice()
        finally:
            for array in made.values():
                array.free()
    return wanted, seen, None, None


def _copied(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Copies that share memory where the arrays do."""
    bases: dict[int, NDArray[Any]] = {}
    found = {}
    for name, array in arrays.items():
        base = array if array.base is None else array.base
        assert isinstance(base, np.ndarray)
        copy = bases.setdefault(id(base), base.copy())
        offset = array.ctypes.data - base.ctypes.data
        buffer = copy.view(np.uint8)  # numpy exports no bfloat16
        found[name] = np.ndarray(array.shape, array.dtype, buffer, offset, array.strides)
    return found


def _placed(array: NDArray[Any], made: dict[int, DeviceArray], device_id: int) -> DeviceArray:
    base = array if array.base is None else array.base
    assert isinstance(base, np.ndarray)
    if id(base) not in made:
        made[id(base)] = DeviceArray.of(base, device_id=device_id)
    offset = array.ctypes.data - base.ctypes.data
    return made[id(base)].seen_as(array.shape, array.strides, offset)


def _compare(
    case: SelftestCase, wanted: dict[str, Any], seen: dict[str, Any], returned: Any, lengths: Any
) -> tuple[str, str]:
    if case.operator == "gather_selection_kv_cache":
        return _compare_selection(case, wanted, seen, returned, lengths)
    for name, array in seen.items():
        right = wanted[name]
        differ = np.argwhere(_bits(array) != _bits(right))
        if differ.size:
            where = "" if name in case.outputs else ", which is only read,"
            first = tuple(int(i) for i in differ[0])
            return "FAIL", (
                f": {name}{where} differs in {len(differ)} of {right.size} elements, first at "
                f"{first}: {array[first]} for {right[first]}"
            )
    return "PASS", ""


def _compare_selection(
    case: SelftestCase, wanted: dict[str, Any], seen: dict[str, Any], returned: Any, lengths: Any
) -> tuple[str, str]:
    """A row's blocks may lie in another order: ids are compared as sets, data by the ids."""
    if not np.array_equal(lengths, returned):
        return "FAIL", f": lengths {lengths.tolist()} for {np.asarray(returned).tolist()}"
    block = case.options["selection_topk_block_size"]
    status = seen["selection_kv_block_status"]
    status = status.reshape(-1, status.shape[-1])
    right = wanted["selection_kv_block_status"].reshape(status.shape)
    steps = len(status) // len(case.arrays["full_kv_actual_seq"])
    for row, ids in enumerate(status):
        if sorted(ids[:-1]) != sorted(right[row, :-1]) or ids[-1] != right[row, -1]:
            return "FAIL", f": the status of row {row} names other blocks"
        for token in range(int(ids[-1])):
            source = int(ids[token // block]) * block + token % block
            for here, full in (
                ("selection_kv_cache", "full_kv_cache"),
                ("selection_k_rope", "full_k_rope"),
            ):
                page, full_page = seen[here].shape[1], case.arrays[full].shape[1]
                table = case.arrays["selection_kv_block_table"][row]
                full_table = case.arrays["full_kv_block_table"][row // steps]
                got = seen[here][table[token // page], token % page]
                original = case.arrays[full][full_table[source // full_page], source % full_page]
                if not np.array_equal(_bits(got), _bits(original)):
                    return "FAIL", f": {here} of row {row}, token {token} is not id {source}'s"
    return "PASS", ""


def _printable(text: str) -> str:
    """The text in printable ASCII: a path may hold any bytes, and reports are pasted."""
    escaped = text.encode("unicode_escape", "surrogatepass").decode()
    return escaped.replace("\\\\", "\\")  # a backslash in the text is kept as it is


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def _status() -> int:
    """End with 70 after an exception: Python's own 1 would mean that a result does not agree."""
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("kvcore: interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # a full disk, or a reader that has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"kvcore: standard output: {error.strerror}", file=sys.stderr)
        return CANNOT_RUN
    except Exception:
        traceback.print_exc()
        return 70
    return code


if __name__ == "__main__":
    sys.exit(_status())
