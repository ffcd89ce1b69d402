# SPDX-License-Identifier: Apache-2.0
"""Calls of operators read from text: NAME=SHAPE:DTYPE words, and lines of logs.

A line of a log is a call when it names arrays of the operator with a shape and a dtype behind
each, or when it names the operator and holds two lists with semicolons, one of shapes and one of
dtypes, as profilers and test tables write them.  Everything else in the line is passed over.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvcore import dtypes
from kvcore.errors import fail

if TYPE_CHECKING:
    from kvcore.ops.questions import Question

__all__ = ["ORDERS", "call_in", "calls_in", "names_arrays", "read_words"]

Call = dict[str, Any]

#: Spellings of torch, CANN (DT_..., ACL_...) and common short ones, in lower case.
ALIASES = {
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
    "byte": "uint8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "hif8": "hifloat8",
    "fp8_e5m2": "float8_e5m2",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "fp4_e2m1": "float4_e2m1",
    "float4_e2m1fn_x2": "float4_e2m1fn_x2",  # whose shapes count pairs
    "fp4_e1m2": "float4_e1m2",
    "double": "float64",
    "bool": "bool",
    "float64": "float64",
    "uint64": "uint64",
} | {name: name for name in dtypes.BY_NAME}

#: Orders of positional lists. aclnn's is the operator's own.
ORDERS = ("auto", "aclnn", "atb")
ATB = (
    *("key", "value", "key_cache", "value_cache", "slot_mapping"),
    *("compress_lens", "seq_lens", "compress_seq_offset"),
)
ATB_KEY_ONLY = ("key", "key_cache", "slot_mapping")
#: A word that marks a line as ATB's, and those under which logs know an operator, in lower case.
ATB_MARK = "reshapeandcache"
MARKS: dict[str, tuple[str, ...]] = {
    "scatter_pa_kv_cache": ("scatterpakvcache", ATB_MARK),
    "scatter_pa_cache": ("scatterpacache", ATB_MARK),
    "kv_cache_update": ("kvcacheoperation", "kvcachend", "kvcacheupdate"),
    "gather_pa_kv_cache": ("gatherpakvcache", "pagedcacheload"),
    "gather_selection_kv_cache": ("gatherselectionkvcache",),
}

#: What stands in a list of dtypes for an array that is not given.
ABSENT = ("", "undefined", "dt_undefined", "null", "none")

# Possessive, all of them: a line may be anything, and nothing that was read is tried again.
BRACKETED = r"[\[(]\s*+(\d++(?:\s*+,\s*+\d++)*+\s*+,?+)?+\s*+[\])]"
SHAPE_LIST = re.compile(r"(?<![\d,;])[\d,]*+(?:;[\d,]*+)++")
DTYPE_LIST = re.compile(r"(?<!\w)\w++(?:;\w*+)++")
SHAPE = re.compile(BRACKETED)
#: A tensor's own attributes, as in key.shape=torch.Size([4, 8, 128]) key.dtype=torch.float16.
ATTRIBUTE = re.compile(r"\.(?:shape|size(?:\(\))?|dtype)(?!\w)")
#: Digits of the largest size of an axis, and of any other number.
MAX_DIGITS = 19
MAX_SIZE = 2**63 - 1
WORD = re.compile(r"[A-Za-z_][\w.]*")


def dtype_of(text: str) -> str | None:
    """The dtype that a word means, or None."""
    plain = re.sub(r"^(torch\.|numpy\.|np\.|ml_dtypes\.|dt_|acl_)", "", text.strip().lower())
    return ALIASES.get(plain)


def _integer(argument: str, text: str) -> int:
    """The number that digits mean; Python refuses to read thousands of them."""
    plain = text.strip().lstrip("-").lstrip("0")
    if len(plain) > MAX_DIGITS or int(plain or "0") > MAX_SIZE:
        seen = text if len(text) <= 2 * MAX_DIGITS else f"{len(text)} characters"
        fail(argument, f"a number of at most {MAX_SIZE}", seen)
    return int(text)


def _sizes(argument: str, text: str) -> tuple[int, ...]:
    return tuple(_integer(argument, size) for size in re.split(r"[,x]", text) if size.strip())


# ---------------------------------------------------------------- words
def read_words(words: Iterable[str], question: Question) -> Call:
    """A call from NAME=VALUE words: SHAPE:DTYPE for an array, the value itself otherwise."""
    allowed = (*question.arrays, *question.words)
    call: Call = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().lower().replace("-", "_")
        if not equals:
            fail("words", "NAME=VALUE", repr(word))
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            fail("words", f"one of {', '.join(allowed)}", f"{name!r}{meant}")
        if name in call:
            fail(name, "one value", "two")
        if name == "layer_id" and re.fullmatch(r"\s*-?\d+\s*", value):
            call["layer"] = _integer(name, value)  # a plain integer needs no array
        elif name in question.arrays:
            call[name] = _array(name, value)
        else:
            call[name] = _value(name, value, question.words)
    return call


def _array(name: str, text: str) -> Any:
    if text.strip().lower() in ("", "none"):
        return None
    shape, colon, spelled = text.rpartition(":")
    shape = shape.strip().strip("[]() ")
    dtype = dtype_of(spelled)
    if not colon or not re.fullmatch(r"(\d+\s*([,x]\s*\d+\s*)*,?)?", shape):
        fail(name, "SHAPE:DTYPE, as in 4,8,128:float16", repr(text))
    if dtype is None:
        fail(name, f"a dtype among {', '.join(dtypes.BY_NAME)}", repr(spelled))
    return _sizes(name, shape), dtype


def _value(name: str, text: str, known: Mapping[str, Any]) -> Any:
    if name in ("strides", "offsets"):
        plain = text.strip().strip("[]() ")
        if not re.fullmatch(r"-?\d+\s*,\s*-?\d+,?", plain):
            fail(name, "two integers, as in 4096,4096", repr(text))
        return tuple(_integer(name, number) for number in plain.split(",") if number.strip())
    if name in ("dtype", "value_dtype"):
        # For an array's type both spellings say the same; only shapes are counted differently.
        found = dtype_of(text) or text
        return "float4_e2m1" if found == "float4_e2m1fn_x2" else found
    if isinstance(known[name], bool):
        if text.strip().lower() not in ("true", "false", "1", "0"):
            fail(name, "true or false", repr(text))
        return text.strip().lower() in ("true", "1")
    if isinstance(known[name], int) or name == "layer":
        if not re.fullmatch(r"\s*-?\d+\s*", text):
            fail(name, "an integer", repr(text))
        return _integer(name, text)
    return text.strip().strip("'\"")


# ---------------------------------------------------------------- lines
def calls_in(
    lines: Iterable[str], question: Question, order: str = "auto"
) -> Iterator[tuple[int, Call]]:
    """(line number from 1, call) of each line that holds one; others are passed over."""
    for number, line in enumerate(lines, 1):
        call = call_in(line, question, order)
        if call is not None:
            yield number, call


def call_in(line: str, question: Question, order: str = "auto") -> Call | None:
    """The call that a line holds, or None.  Raises ParamInvalidError for a number that is none."""
    return _named(line, question) or _listed(line, question, order)


def names_arrays(line: str, question: Question) -> bool:
    """Whether a line is about the operator: it names it, or one of its arrays with a shape."""
    if _is_marked(line, question):
        return True
    mentions = _mentions(line, question)
    ends = [start for _, start, _ in mentions[1:]]
    return any(
        name in question.arrays and _shape_in(line[start:end]) is not None
        for (name, _, start), end in zip(mentions, [*ends, len(line)], strict=False)
    )


def _is_marked(line: str, question: Question) -> bool:
    plain = line.lower().replace("_", "")
    return any(mark in plain for mark in MARKS[question.operator.name])


def _spelling(name: str) -> str:
    """A pattern for key_cache, keyCache, key-cache, keyCacheRef and key_cache_optional."""
    return "[ _-]?".join(name.split("_")) + "(?:_?ref|_?optional)*"


def _mentions(line: str, question: Question) -> list[tuple[str, int, int]]:
    """(name, where it begins, where it ends) in the order of the line, of several the longest."""
    # dtype stands in a line for the array before it, not for the operator's argument.
    words = tuple(name for name in question.words if "dtype" not in name)
    found = [
        (name, match.start(), match.end())
        for name in (*question.arrays, *words)
        for match in re.finditer(rf"(?<![\w.]){_spelling(name)}(?!\w)", line, re.IGNORECASE)
        if name in question.arrays or _quoted(line[match.end() :], name) is not None
    ]
    found.sort(key=lambda mention: (mention[1], -mention[2]))
    kept: list[tuple[str, int, int]] = []
    for mention in found:
        if not kept or mention[1] >= kept[-1][2]:
            kept.append(mention)
    return kept


def _named(line: str, question: Question) -> Call | None:
    mentions = _mentions(line, question)
    ends = [start for _, start, _ in mentions[1:]]
    call: Call = {}
    attributes: dict[str, dict[str, Any]] = {}
    for (name, _, start), end in zip(mentions, [*ends, len(line)], strict=False):
        text = line[start:end]
        if name in call:
            continue
        if name in question.arrays:
            # A name may stand in the line's words too, without a shape behind it.
            shape, dtype = _shape_in(text), _dtype_in(text)
            if shape is None or dtype is None:
                if not ATTRIBUTE.match(text):
                    continue
                # Shape and dtype are printed one by one.
                known = attributes.setdefault(name, {"shape": None, "dtype": None})
                shape = known["shape"] = known["shape"] or shape
                dtype = known["dtype"] = known["dtype"] or dtype
            if shape is not None and dtype is not None:
                call[name] = _sizes(name, shape[1] or ""), dtype
        else:
            value = _quoted(text, name)
            if value is not None:
                call[name] = _value(name, value, question.words)
    arrays = [name for name in call if name in question.arrays]
    return call if len(arrays) > 1 else None


def _shape_in(text: str) -> re.Match[str] | None:
    """The first shape in brackets behind an array's name."""
    return SHAPE.search(text, len(".size()") if text.startswith(".size()") else 0)


def _dtype_in(text: str) -> str | None:
    """The first word behind an array's name that is a dtype."""
    return next((d for word in WORD.findall(text) if (d := dtype_of(word)) is not None), None)


def _quoted(text: str, name: str) -> str | None:
    """The value behind a word: ``=PA_NZ``, ``: "PA_NZ"``, ``=[4096, 4096]``; else None."""
    if name in ("strides", "offsets"):
        # Two integers are the operator's; any other number of them are an array's own strides.
        found = re.match(rf"\s*['\"]?\s*[=:]\s*{BRACKETED}", text)
        return found[1] if found is not None and len((found[1] or "").split(",")) == 2 else None
    found = re.match(r"\s*['\"]?\s*[=:]\s*['\"]?(-?\w+)['\"]?", text)
    return None if found is None else found[1]


def _listed(line: str, question: Question, order: str) -> Call | None:
    # A profile lists every operator of a model.
    if not _is_marked(line, question):
        return None
    kinds = None
    for match in DTYPE_LIST.finditer(line):
        words = match[0].split(";")
        found = ["" if word.lower() in ABSENT else dtype_of(word) for word in words]
        if None not in found and any(found):
            kinds = found
            break
    if kinds is None:
        return None
    for match in SHAPE_LIST.finditer(line):
        shapes = match[0].split(";")
        if len(shapes) == len(kinds) and any(shapes):
            break
    else:
        return None
    names = _order(line.lower().replace("_", ""), question, order, len(kinds))
    return {
        name: (_sizes(name, shape), kind)
        for name, shape, kind in zip(names, shapes, kinds, strict=False)
        if kind
    }


def _order(line: str, question: Question, order: str, count: int) -> tuple[str, ...]:
    atb = order == "atb" or (order == "auto" and ATB_MARK in line)
    if not atb or "slot_mapping" not in question.arrays:
        return question.arrays
    return ATB_KEY_ONLY if count == len(ATB_KEY_ONLY) else ATB
