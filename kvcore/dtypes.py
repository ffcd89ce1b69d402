# SPDX-License-Identifier: Apache-2.0
"""The dtype table: one row a type that the operators move.

numpy lacks most of them: ``ml_dtypes`` gives bfloat16 and float8, ``en_dtypes`` (optional)
gives hifloat8.  A raw unsigned array of the same item size is named with ``dtype=``.
float4 is taken packed, two a byte with the low nibble first, so its *storage* item is one byte.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BY_NAME", "INDEX_DTYPES", "TABLE", "TORCH_NAMES", "DType", "get", "named"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    name:     the public name, as in ``dtype="bfloat16"``.
    bits:     bits of one element (4 for float4).
    itemsize: bytes of one *stored* item (float4: 1, a pair).
    kind:     "float", "int", "uint" or "float4".
    acl:      the aclDataType value (acl/acl_base_rt.h), or None where ACL has none.
    id:       position in TABLE; what the compiled path carries.
    raw:      numpy name of the unsigned array that may carry its bits.
    """

    id: int
    name: str
    bits: int
    itemsize: int
    kind: str
    acl: int | None
    raw: str

    @property
    def packed(self) -> bool:
        """True for types stored two elements a byte."""
        return self.bits == 4

    def __str__(self) -> str:
        return self.name


def _row(i: int, name: str, bits: int, kind: str, acl: int | None) -> DType:
    size = max(bits // 8, 1)
    return DType(i, name, bits, size, kind, acl, f"uint{size * 8}")


TABLE: tuple[DType, ...] = tuple(
    _row(i, *row)
    for i, row in enumerate(
        [
            ("float16", 16, "float", 1),
            ("bfloat16", 16, "float", 27),
            ("float32", 32, "float", 0),
            ("int8", 8, "int", 2),
            ("uint8", 8, "uint", 4),
            ("int16", 16, "int", 6),
            ("uint16", 16, "uint", 7),
            ("int32", 32, "int", 3),
            ("uint32", 32, "uint", 8),
            ("hifloat8", 8, "float", 34),
            ("float8_e5m2", 8, "float", 35),
            ("float8_e4m3fn", 8, "float", 36),
            ("float4_e2m1", 4, "float4", 40),
            ("float4_e1m2", 4, "float4", 41),
            # index arrays only
            ("int64", 64, "int", 9),
        ]
    )
)
BY_NAME: dict[str, DType] = {t.name: t for t in TABLE}
#: Types of data arrays; int64 is an index type only.
DATA_DTYPES: tuple[DType, ...] = TABLE[:14]
INDEX_DTYPES: tuple[DType, ...] = (BY_NAME["int32"], BY_NAME["int64"])


#: (code, bits, lanes) of DLPack 1.1 (dlpack.h) by a type's name, for types that numpy does not
#: have; float4 is packed two a byte.  Those without a row above are for the runtime's buffers only.
DLPACK_BEYOND_NUMPY: dict[str, tuple[int, int, int]] = {
    "bfloat16": (4, 16, 1),
    "float8_e3m4": (7, 8, 1),
    "float8_e4m3": (8, 8, 1),
    "float8_e4m3b11fnuz": (9, 8, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e4m3fnuz": (11, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e5m2fnuz": (13, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1": (17, 4, 2),
}
#: The same for all types.
DLPACK: dict[str, tuple[int, int, int]] = {
    **{f"int{bits}": (0, bits, 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits, 1) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits, 1) for bits in (16, 32, 64)},
    "bool": (6, 8, 1),
    **DLPACK_BEYOND_NUMPY,
}

#: Names that torch has for rows of the table.
TORCH_NAMES = {"float4_e2m1fn_x2": "float4_e2m1"}


def named(spelled: str) -> DType | None:
    """The row of a name as this table or torch spells it ("torch.bfloat16"); None: no row."""
    name = spelled.removeprefix("torch.")
    return BY_NAME.get(TORCH_NAMES.get(name, name))


def get(name: str) -> DType:
    """The row of that name; KeyError when there is none."""
    return BY_NAME[name]
