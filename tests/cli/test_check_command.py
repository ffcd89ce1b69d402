# SPDX-License-Identifier: Apache-2.0
"""kvcore check: words and log lines in, verdicts and an exit status out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import kvcore
from kvcore.cli import main
from kvcore.cli.calls import MARKS, calls_in, dtype_of, read_words
from kvcore.cli.commands.check import OPERATORS
from kvcore.errors import ParamInvalidError
from kvcore.ops.questions import QUESTIONS

SCATTER = QUESTIONS["scatter_pa_kv_cache"]
HALVES = (
    "key=4,8,128:float16 key_cache=64,16,8,128:float16 slot_mapping=4:int32 "
    "value=4,8,128:float16 value_cache=64,16,8,128:float16"
)
FLOATS = HALVES.replace("float16", "float32")
CALL: dict[str, Any] = {
    "key": ((4, 8, 128), "float16"),
    "key_cache": ((64, 16, 8, 128), "float16"),
    "slot_mapping": ((4,), "int32"),
    "value": ((4, 8, 128), "float16"),
    "value_cache": ((64, 16, 8, 128), "float16"),
}


def check(text: str, *options: str) -> int:
    return main(["check", *text.split(), *options])


def shown(capsys: pytest.CaptureFixture[str], text: str, *options: str) -> tuple[int, Any]:
    """(exit status, what --json prints)"""
    code = check(text, "--json", *options)
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, json.loads(captured.out)


# ---------------------------------------------------------------- by hand
def test_a_call_that_runs_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(HALVES) == 0
    assert capsys.readouterr().out.splitlines() == [
        "scatter_pa_kv_cache, scenario 2",
        "A2: runs",
        "A3: runs",
        "950: runs",
    ]


def test_a_call_that_a_soc_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(FLOATS) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("A2: refused: key: expected dtype float16, bfloat16 or int8 ")
    assert lines[3] == "950: runs"


def test_only_the_socs_asked_for_decide(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(FLOATS, "--soc", "950") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["950: runs"]
    code, answer = shown(capsys, FLOATS, "--soc", "950, A2")
    assert code == 1
    assert list(answer["calls"][0]["runs"]) == ["A2", "950"]


def test_warnings_are_shown_and_do_not_fail(capsys: pytest.CaptureFixture[str]) -> None:
    words = HALVES + " scatter_mode=Nct strides=1024,1024 offsets=0,0"
    assert check(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "950: runs"
    assert lines[4].startswith("  warned of: 950: the tiling refuses T * stride + offset > ")
    code, answer = shown(capsys, words)
    assert code == 0
    assert list(answer["calls"][0]["warnings"]) == ["950"]
    assert len(answer["calls"][0]["warnings"]["950"]) == 2


def test_json_says_what_scenario_of_says(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = shown(capsys, FLOATS)
    floats = {
        name: (shape, "float32" if dtype == "float16" else dtype)
        for name, (shape, dtype) in CALL.items()
    }
    wanted = kvcore.scenario_of(**floats)
    assert code == 1
    assert answer == {
        "operator": "scatter_pa_kv_cache",
        "calls": [
            {
                "line": None,
                "times": 1,
                "scenario": wanted.number,
                "error": None,
                "runs": wanted.runs,
                "warnings": {},
            }
        ],
    }


def test_a_call_that_no_machine_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    words = HALVES.replace("slot_mapping=4:", "slot_mapping=5:")
    assert check(words) == 1
    lines = capsys.readouterr().out.splitlines()
    reason = "slot_mapping: expected shape [4] (T of key), got [5]"
    assert lines == ["scatter_pa_kv_cache", f"refused without a SoC too: {reason}"]
    code, answer = shown(capsys, words)
    assert code == 1
    (call,) = answer["calls"]
    assert call["error"] == reason
    assert call["scenario"] is None
    assert call["runs"] == {"A2": reason, "A3": reason, "950": reason}


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("key=4,8,128:float16", ((4, 8, 128), "float16")),
        ("key=[4,8,128]:torch.bfloat16", ((4, 8, 128), "bfloat16")),
        ("key=(4,8,128,):FP16", ((4, 8, 128), "float16")),
        ("key=4x8x128:DT_INT8", ((4, 8, 128), "int8")),
        ("Key=4:f32", ((4,), "float32")),
        ("key=:float16", ((), "float16")),
        ("key=[]:float16", ((), "float16")),
        ("key=None", None),
        ("key=", None),
    ],
)
def test_how_an_array_is_written(words: str, key: Any) -> None:
    assert read_words([words], SCATTER) == {"key": key}


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("strides=4096,2048", "strides", (4096, 2048)),
        ("offsets=[0,-1]", "offsets", (0, -1)),
        ("cache-mode=PA_NZ", "cache_mode", "PA_NZ"),
        ("scatter_mode='Nct'", "scatter_mode", "Nct"),
        ("dtype=BF16", "dtype", "bfloat16"),
        ("value_dtype=float4_e2m1", "value_dtype", "float4_e2m1"),
        ("dtype=float17", "dtype", "float17"),
    ],
)
def test_how_another_argument_is_written(word: str, name: str, value: Any) -> None:
    assert read_words([word], SCATTER) == {name: value}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("key", "words: expected NAME=VALUE, got 'key'"),
        ("keys=4:int8", "got 'keys' (did you mean key?)"),
        ("soc=A3", "words: expected one of key, key_cache, slot_mapping, value, "),
        ("key=4,8,128", "key: expected SHAPE:DTYPE, as in 4,8,128:float16, got '4,8,128'"),
        ("key=4,8,128:float17", "key: expected a dtype among float16, bfloat16, float32, "),
        ("key=4,b,128:float16", "key: expected SHAPE:DTYPE"),
        ("key=-4:float16", "key: expected SHAPE:DTYPE"),
        ("key=4:int8 key=4:int8", "key: expected one value, got two"),
        ("strides=1", "strides: expected two integers, as in 4096,4096, got '1'"),
        ("strides=1,2,3", "strides: expected two integers"),
        ("strides=a,b", "strides: expected two integers"),
        ("--order sideways", "invalid choice: 'sideways'"),
        ("--soc A4", "expected names among A2, A3, 950 with commas between, got 'A4'"),
        ("--soc A2,", "got ''"),
        ("--operator scatter", "invalid choice: 'scatter'"),
        ("--jsn", "unknown option --jsn; did you mean --json?"),
        ("", "words: expected arguments of the operator as NAME=VALUE, or --log FILE, got none"),
        ("--log /no/such/log", "/no/such/log: No such file or directory"),
    ],
)
def test_what_is_wrong_is_answered(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_a_mode_that_does_not_exist_is_refused_everywhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check(HALVES + " scatter_mode=Alibis") == 1
    assert "refused without a SoC too: scatter_mode: expected one of" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["cache_mode=foo", "scatter_mode=foo", "dtype=foo"])
def test_a_word_without_its_arrays_is_no_call(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert check(word) == 2
    assert "key: expected an array" in capsys.readouterr().err
    assert check(HALVES + " " + word) == 1  # which is one, that no machine accepts
    assert word.split("=")[0] in capsys.readouterr().out


# ---------------------------------------------------------------- other operators
@pytest.mark.parametrize("layer", ["layer_id=0", "layer_id=1:int32"])
def test_kv_cache_update(layer: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        f"new_kv=5,32:float16 {layer} past=1,2,8,32:float16 token_offset=2:int32 seq_len=2:int32"
    )
    code, answer = shown(capsys, words, "--operator", "kv_cache_update")
    assert code == 1
    (call,) = answer["calls"]
    assert call["scenario"] is None
    assert call["runs"] == {
        "A2": None,
        "A3": None,
        "950": "soc: expected 'A2' or 'A3' for kv_cache_update, got '950'",
    }
    code, _ = shown(capsys, words, "--operator", "kv_cache_update", "--soc", "A2,A3")
    assert code == 0


@pytest.mark.parametrize(("cumsum", "lengths"), [("false", 2), ("True", 3), ("0", 2), ("1", 3)])
def test_gather_pa_kv_cache(cumsum: str, lengths: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "key_cache=8,16,2,32:float16 value_cache=8,16,2,32:float16 block_tables=2,4:int32 "
        f"seq_lens={lengths}:int32 key=9,2,32:float16 value=9,2,32:float16 "
        f"is_seq_lens_cumsum={cumsum}"
    )
    code, answer = shown(capsys, words, "--operator", "gather_pa_kv_cache")
    assert answer["calls"][0]["error"] is None
    assert code == 0
    code, answer = shown(capsys, words.replace("16:", "32:"), "--operator", "gather_pa_kv_cache")
    wide = words.replace("float16", "float32")
    code, answer = shown(capsys, wide, "--operator", "gather_pa_kv_cache")
    assert code == 1
    assert answer["calls"][0]["runs"]["950"] is None


@pytest.mark.parametrize(
    ("topk", "block", "a3"),
    [(2, 64, None), (33, 64, "selection_topk_block_size: expected 1 with a top-k above 32 on A3")],
)
def test_gather_selection_kv_cache(
    topk: int, block: int, a3: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "selection_k_rope=64,128,64:float16 selection_kv_cache=64,128,512:float16 "
        f"selection_kv_block_table=2,32:int32 selection_kv_block_status=2,1,1,{topk + 1}:int32 "
        f"selection_topk_indices=2,1,1,{topk}:int32 full_k_rope=9,128,64:float16 "
        "full_kv_cache=9,128,512:float16 full_kv_block_table=2,4:int32 "
        f"full_kv_actual_seq=2:int32 full_q_actual_seq=2:int32 selection_topk_block_size={block}"
    )
    code, answer = shown(capsys, words, "--operator", "gather_selection_kv_cache")
    (call,) = answer["calls"]
    assert code == 1
    assert call["error"] is None
    assert call["runs"]["950"].startswith("soc: expected 'A3' or 'A2'")
    reason = call["runs"]["A3"]
    assert reason is None if a3 is None else reason.startswith(a3)


def test_the_command_knows_every_operator() -> None:
    assert tuple(QUESTIONS) == OPERATORS
    assert set(QUESTIONS) <= set(MARKS)


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_operator_can_be_asked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--operator", name, "nothing=1"]) == 2
    allowed = ", ".join((*QUESTIONS[name].arrays, *QUESTIONS[name].words))
    assert f"expected one of {allowed}, got 'nothing'" in capsys.readouterr().err


# ---------------------------------------------------------------- logs
NAMED = [
    "key [4, 8, 128] torch.float16, key_cache [64, 16, 8, 128] torch.float16, "
    "slot_mapping [4] torch.int32, value [4, 8, 128] torch.float16, "
    "value_cache [64, 16, 8, 128] torch.float16",
    "[INFO] op(pid:12) key: shape=torch.Size([4, 8, 128]) dtype=torch.float16 stride=(1024, 128, "
    "1); keyCache: shape=torch.Size([64, 16, 8, 128]) dtype=torch.float16; slotMapping: "
    "shape=torch.Size([4]) dtype=torch.int32; value: shape=torch.Size([4, 8, 128]) "
    "dtype=torch.float16; valueCache: shape=torch.Size([64, 16, 8, 128]) dtype=torch.float16",
    "keyCacheRef:(64,16,8,128),DT_FLOAT16 valueCacheRef:(64,16,8,128),DT_FLOAT16 "
    "key:(4,8,128),DT_FLOAT16 value:(4,8,128),DT_FLOAT16 slotMapping:(4,),DT_INT32",
    "<key: float16 (4, 8, 128)> <key_cache: float16 (64, 16, 8, 128)> <slot_mapping: int32 (4,)> "
    "<value: float16 (4, 8, 128)> <value_cache: float16 (64, 16, 8, 128)>",
    "Key half [4,8,128] Key cache half [64,16,8,128] Slot mapping int [4] Value half [4,8,128] "
    "Value-cache half [64,16,8,128]",
]
LISTS = [
    ("ScatterPaKvCache,AI_VECTOR_CORE,{s},{d},ND;ND;ND;ND;ND", "aclnn"),
    ('"aclnnScatterPaKvCache_ScatterPaKvCacheAiCore","{s}","{d}"', "aclnn"),
    (
        "1      |ReshapeAndCacheOperation|{{}}     |5    |{d}|nd;nd;nd;nd;nd|{s}|2|float16|4,8,128",
        "atb",
    ),
    ("torch scatter_pa_kv_cache {d} {s}", "aclnn"),
]
ACLNN = "4,8,128;64,16,8,128;4;4,8,128;64,16,8,128"
ATB = "4,8,128;4,8,128;64,16,8,128;64,16,8,128;4"


def only_call(line: str, order: str = "auto") -> dict[str, Any]:
    ((number, call),) = calls_in([line], SCATTER, order)
    assert number == 1
    return call


@pytest.mark.parametrize("line", NAMED)
def test_a_line_that_names_its_arrays(line: str) -> None:
    assert only_call(line) == CALL


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (" cache_mode=PA_NZ", {"cache_mode": "PA_NZ"}),
        (' cacheMode: "PA_NZ"', {"cache_mode": "PA_NZ"}),
        (" scatterModeOptional = 'Nct'", {"scatter_mode": "Nct"}),
        (
            " scatter_mode=Nct strides=[4096, 4096] offsets=[0, 1024]",
            {"scatter_mode": "Nct", "strides": (4096, 4096), "offsets": (0, 1024)},
        ),
        (" strides=(1024, 128, 1)", {}),
        (" the key is float16 and its cache mode is the usual", {}),
    ],
)
@pytest.mark.parametrize("line", NAMED)
def test_modes_in_a_line_that_names_its_arrays(line: str, tail: str, words: dict[str, Any]) -> None:
    assert only_call(line + tail) == CALL | words


@pytest.mark.parametrize(("form", "order"), LISTS)
def test_a_line_with_two_lists(form: str, order: str) -> None:
    shapes = ATB if order == "atb" else ACLNN
    dtypes = ["float16"] * 5
    dtypes[4 if order == "atb" else 2] = "int32"
    for spelled in (";".join(dtypes), ";".join(dtypes).upper().replace("FLOAT", "DT_FLOAT")):
        line = form.format(s=shapes, d=spelled)
        assert only_call(line) == CALL
        assert only_call(line, order) == CALL


def test_lists_with_absent_arrays() -> None:
    line = "ScatterPaKvCache 4,8,128;64,16,8,128;4;;;;; FLOAT16;FLOAT16;INT32;;UNDEFINED;;;"
    assert only_call(line) == {name: CALL[name] for name in ("key", "key_cache", "slot_mapping")}


def test_three_arrays_of_atb_are_a_key_alone() -> None:
    line = "|ReshapeAndCacheOperation|int8;int8;int32|nd;nd;nd|2,32,128;512,128,32,128;2|"
    assert only_call(line) == {
        "key": ((2, 32, 128), "int8"),
        "key_cache": ((512, 128, 32, 128), "int8"),
        "slot_mapping": ((2,), "int32"),
    }


@pytest.mark.parametrize(
    "line",
    [
        "",
        "\x00\xff;;;;",
        "key",
        "the key [4, 8, 128] is float16",  # one array is no call
        "key_cache, value_cache and slot_mapping are ready",
        "MatMulV2,AI_CORE,4,8;8,4;4,FLOAT16;FLOAT16;FLOAT16",  # another operator's
        "ScatterPaKvCache without shapes",
        "ScatterPaKvCache FLOAT16;FLOAT16;INT32 4,8,128;64,16,8,128",  # three and two
        "monkey [4] int8 hockey [4] int8 value_caches [5] int8",
        ";" * 10_000,
        "[" * 10_000,
        "key" * 10_000,
    ],
)
def test_other_lines_are_passed_over(line: str) -> None:
    assert list(calls_in([line], SCATTER)) == []


def test_a_log_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    other = NAMED[0].replace("float16", "float32")
    log.write_bytes(
        "\n".join(["begin \xe4", NAMED[0], NAMED[1], "noise", other, NAMED[2]]).encode("latin-1")
    )
    code, answer = shown(capsys, "", "--log", str(log))
    assert code == 1
    assert [(call["line"], call["times"]) for call in answer["calls"]] == [(2, 3), (5, 1)]
    assert check("", "--log", str(log)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "line 2: scatter_pa_kv_cache, scenario 2, 3 times"
    assert lines[4] == "line 5: scatter_pa_kv_cache, scenario 2"
    assert check("", "--log", str(log), "--soc", "950") == 0


def test_words_hold_for_every_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        "ScatterPaKvCache 4,8,128;64,64,16,16;4;4,8,128;64,64,16,16 "
        "FLOAT16;FLOAT16;INT32;FLOAT16;FLOAT16"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, answer = shown(capsys, "cache_mode=PA_NZ", "--log", "-")
    assert code == 0
    assert answer["calls"][0]["scenario"] == 1


def test_a_log_without_a_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("nothing\nhere\n"))
    assert check("", "--log", "-") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "kvcore check: --log: expected a line with shapes and dtypes of scatter_pa_kv_cache, "
        "got none\n"
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.float16", "float16"),
        ("torch.half", "float16"),
        ("np.int8", "int8"),
        ("DT_BF16", "bfloat16"),
        ("ACL_FLOAT16", "float16"),
        ("FLOAT", "float32"),
        ("HIFLOAT8", "hifloat8"),
        ("torch.float8_e4m3fn", "float8_e4m3fn"),
        ("torch.float4_e2m1fn_x2", "float4_e2m1fn_x2"),
        ("DT_FLOAT4_E2M1", "float4_e2m1"),
        ("long", "int64"),
        ("ND", None),
        ("", None),
        ("torch.", None),
    ],
)
def test_spellings_of_dtypes(text: str, name: str | None) -> None:
    assert dtype_of(text) == name


def test_a_broken_array_is_an_error_of_its_own() -> None:
    with pytest.raises(ParamInvalidError):
        read_words(["key=4"], SCATTER)


# ---------------------------------------------------------------- what is not understood
PRINTED = (
    "key.shape=torch.Size([4, 8, 128]) key.dtype=torch.float16 "
    "key_cache.shape=torch.Size([64, 16, 8, 128]) key_cache.dtype=torch.float16 "
    "slot_mapping.shape=torch.Size([4]) slot_mapping.dtype=torch.int32 "
    "value.shape=torch.Size([4, 8, 128]) value.dtype=torch.float16 "
    "value_cache.shape=torch.Size([64, 16, 8, 128]) value_cache.dtype=torch.float16"
)


@pytest.mark.parametrize(
    "line",
    [
        PRINTED,
        PRINTED.replace(".shape=", ".size()="),
        ", ".join(
            [f"{name}.dtype={dtype}" for name, (_, dtype) in CALL.items()]
            + [f"{name}.shape={list(shape)}" for name, (shape, _) in CALL.items()]
        ),
    ],
)
def test_attributes_printed_one_by_one(line: str) -> None:
    assert only_call(line) == CALL


def test_a_dtype_in_the_line_s_words_is_nobody_s() -> None:
    line = "key [4, 8] and key_cache [9, 8]; the value is float16, slot_mapping int32"
    assert list(calls_in([line], SCATTER)) == []


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([NAMED[0]], "1 line read, 1 with a call, 0 not understood"),
        ([NAMED[0], "", "begin", NAMED[1]], "3 lines read, 2 with a call, 1 not understood"),
        (
            ["key.shape=torch.Size([4, 8, 128])", NAMED[0], "begin"],
            "3 lines read, 1 with a call, 2 not understood; 1 of these names arrays of "
            "scatter_pa_kv_cache, first line 1: no shape and dtype for each of its arrays",
        ),
        (
            [NAMED[0], *["key [4, 8, 128] int8, key_cache [64, 16, 8, 128] int8"] * 2],
            "3 lines read, 1 with a call, 2 not understood; 2 of these name arrays of "
            "scatter_pa_kv_cache, first line 2: slot_mapping: expected an array, got None",
        ),
        (
            [NAMED[0], NAMED[0].replace("[4]", f"[{10**30}]")],
            "2 lines read, 1 with a call, 1 not understood; 1 of these names arrays of "
            f"scatter_pa_kv_cache, first line 2: slot_mapping: expected a number of at most "
            f"{2**63 - 1}, got {10**30}",
        ),
    ],
)
def test_how_much_of_a_log_was_understood(
    lines: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(lines))
    assert check("", "--log", str(log)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == told
    _, answer = shown(capsys, "", "--log", str(log))
    counts = answer["lines"]
    assert told.startswith(f"{counts['read']} line")
    assert f" {counts['calls']} with a call, {counts['not_understood']} not " in told
    assert counts["first_close"] is None or f"first line {counts['first_close']}: " in told


def test_a_log_that_nearly_has_a_call_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("begin\nkey [4, 8, 128] int8, key_cache [64, 16, 8, 128] int8\n")
    assert check("", "--log", str(log)) == 2
    assert "first line 2: slot_mapping: expected an array, got None" in capsys.readouterr().err
    # A word beside the log gives it.
    assert check("slot_mapping=4:int32", "--log", str(log), "--soc", "A2") == 0


def test_a_long_line_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(["x" * 200_000, NAMED[0], "key [4] int8 " * 20_000, NAMED[0]]))
    code, answer = shown(capsys, "", "--log", str(log))
    assert code == 0
    assert [(call["line"], call["times"]) for call in answer["calls"]] == [(2, 2)]
    assert answer["lines"]["not_understood"] == 2
    monkeypatch.setattr("kvcore.cli.log.MAX_SKIPPED", 2**20)
    assert check("", "--log", "/dev/zero") == 2
    assert "--log, line 1: expected at most 1048576 bytes, got more" in capsys.readouterr().err


@pytest.mark.parametrize(
    "piece",
    ["1", "a", ";", "1;", "a;", "[", "[1", "[1 ", "[1, ", "(1 ,", "key", "key ", "key.shape=[1",
     "key [4] int8 ", "ScatterPaKvCache ", "\\x1b[2J"],
)  # fmt: skip
def test_no_line_takes_long(piece: str) -> None:
    """The longest line that is looked at, of pieces that a search could try again and again."""
    line = "ScatterPaKvCache " + piece * (2**16 // len(piece))
    assert list(calls_in([line], SCATTER)) == []


@pytest.mark.parametrize("name", ["key", "key_cache", "slot_mapping", "value", "value_cache"])
def test_a_forgotten_argument_is_no_refusal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(word for word in HALVES.split() if not word.startswith(f"{name}="))
    for options in ((), ("--json",)):
        assert check(words, *options) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"kvcore check: {name}: expected an array")
    # Key alone is a call: nothing is forgotten.
    assert (
        check(" ".join(word for word in HALVES.split() if "value" not in word), "--soc", "A2") == 0
    )


@pytest.mark.parametrize(
    "word",
    [
        f"key={'9' * 5000},8,128:float16",
        f"key={2**63},8,128:float16",
        f"strides={'9' * 5000},1",
        f"offsets=1,-{'9' * 400}",
    ],
)
def test_numbers_beyond_any_size(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(word) == 2
    name = word.partition("=")[0]
    err = capsys.readouterr().err
    assert err.startswith(f"kvcore check: {name}: expected a number of at most {2**63 - 1}, got ")
    assert len(err) < 200
    assert read_words([f"key=0{2**63 - 1}:int8"], SCATTER) == {"key": ((2**63 - 1,), "int8")}
