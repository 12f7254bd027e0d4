"""Element types and block formats: what a tensor's memory holds, as data.

A block format is a record of little-endian fields. How its codes become values is written in the kernel language, in
`kernels/quants.py`; here are only the places and sizes (ggml's formats, as `ggml-common.h` lays them out).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

UNIT_NBYTES = {"u8": 1, "i8": 1, "u16": 2, "i16": 2, "f16": 2, "bf16": 2, "u32": 4, "i32": 4, "f32": 4, "i64": 8}
NUMPY_UNIT = {"u8": "u1", "i8": "i1", "u16": "<u2", "i16": "<i2", "f16": "<f2", "bf16": "<u2", "u32": "<u4", "i32": "<i4",
              "f32": "<f4", "i64": "<i8"}


@dataclass(frozen=True)
class Field:
    """`count` units at byte `offset` of a block."""

    name: str
    unit: str
    count: int
    offset: int

    @property
    def nbytes(self) -> int:
        return UNIT_NBYTES[self.unit] * self.count


@dataclass(frozen=True)
class DType:
    """An element type (`block_size` 1) or a block format.

    Attributes:
        name: ggml's name in lower case ("f32", "q4_1", "q4_k").
        nbytes: bytes of one block.
        fields: the record of a block, empty for plain elements.
        code_range: smallest and largest code before `zero` is taken off; value = scale * (code - zero) - offset.
        has_offset: whether blocks carry a minimum that is taken off.
        scale_run: elements that share one scale.
        aliases: other names for bytes that `fields` hold already.
        ggml_id: the id in GGUF files, None for types that never stand in a file.
    """

    name: str
    block_size: int
    nbytes: int
    fields: tuple[Field, ...] = ()
    code_range: tuple[int, int] = (0, 0)
    zero: int = 0
    has_offset: bool = False
    scale_run: int = 32
    aliases: tuple[Field, ...] = ()
    ggml_id: int | None = None

    @property
    def is_block(self) -> bool:
        return bool(self.fields)

    @property
    def numpy(self) -> np.dtype:
        """The NumPy type of one stored element or block; bf16 travels as uint16."""
        if not self.is_block:
            return np.dtype(NUMPY_UNIT[self.name])
        return np.dtype([(f.name, NUMPY_UNIT[f.unit], (f.count,)) for f in self.fields])

    def field(self, name: str) -> Field | None:
        return next((f for f in (*self.fields, *self.aliases) if f.name == name), None)

    def alignment(self, field: Field) -> int:
        """Bytes a unit of `field` is sure to be aligned to in the file's layout."""
        return gcd(gcd(self.nbytes, field.offset or self.nbytes), UNIT_NBYTES[field.unit])

    def row_nbytes(self, n: int) -> int:
        """Bytes of a row of `n` elements."""
        return n // self.block_size * self.nbytes

    def __repr__(self) -> str:
        return self.name


def _plain(name: str, ggml_id: int | None) -> DType:
    return DType(name, 1, UNIT_NBYTES[name], ggml_id=ggml_id)


def _block(name: str, block_size: int, record: str, ggml_id: int | None = None, **facts: object) -> DType:
    """A format from one line: "d f16, qs u32[4]"."""
    fields, offset = [], 0
    for part in record.split(","):
        label, unit = part.split()
        unit, _, count = unit.partition("[")
        field = Field(label, unit, int(count.rstrip("]") or 1), offset)
        fields.append(field)
        offset += field.nbytes
    facts.setdefault("aliases", (Field("bytes", "u8", offset, 0),))
    return DType(name, block_size, offset, tuple(fields), ggml_id=ggml_id, **facts)  # type: ignore[arg-type]


F32, F16, BF16 = _plain("f32", 0), _plain("f16", 1), _plain("bf16", 30)
I8, I16, I32, I64 = _plain("i8", 24), _plain("i16", 25), _plain("i32", 26), _plain("i64", 27)
Q4_0 = _block("q4_0", 32, "d f16, qs u32[4]", 2, code_range=(0, 15), zero=8)
Q4_1 = _block("q4_1", 32, "d f16, m f16, qs u32[4]", 3, code_range=(0, 15), has_offset=True)
Q5_0 = _block("q5_0", 32, "d f16, qh u32, qs u32[4]", 6, code_range=(0, 31), zero=16)
Q5_1 = _block("q5_1", 32, "d f16, m f16, qh u32, qs u32[4]", 7, code_range=(0, 31), has_offset=True)
Q8_0 = _block("q8_0", 32, "d f16, qs u32[8]", 8, code_range=(-128, 127))
Q4_K = _block("q4_k", 256, "d f16, dmin f16, scales u32[3], qs u32[32]", 12, code_range=(0, 15), has_offset=True)
Q5_K = _block("q5_k", 256, "d f16, dmin f16, scales u32[3], qh u32[8], qs u32[32]", 13, code_range=(0, 31), has_offset=True)
Q6_K = _block("q6_k", 256, "ql u32[32], qh u32[16], scales i8[16], d f16", 14, code_range=(0, 63), zero=32, scale_run=16)
Q2_K = _block("q2_k", 256, "scales u8[16], qs u32[16], d f16, dmin f16", 10, code_range=(0, 3), has_offset=True, scale_run=16)
Q3_K = _block("q3_k", 256, "hmask u32[8], qs u32[16], scales u32[3], d f16", 11, code_range=(0, 7), zero=4, scale_run=16)
IQ1_S = _block("iq1_s", 256, "d f16, qs u32[8], qh u16[8]", 19, code_range=(-9, 9))
IQ1_M = _block("iq1_m", 256, "qs u32[8], qh u16[8], scales u16[4]", 29, code_range=(-9, 9), scale_run=16)
IQ2_XXS = _block("iq2_xxs", 256, "d f16, qs u32[16]", 16, code_range=(-43, 43))
IQ2_XS = _block("iq2_xs", 256, "d f16, qs u16[32], scales u8[8]", 17, code_range=(-43, 43), scale_run=16)
IQ2_S = _block("iq2_s", 256, "d f16, qs u32[8], signs u32[8], qh u8[8], scales u8[8]", 22, code_range=(-43, 43), scale_run=16)
IQ3_XXS = _block("iq3_xxs", 256, "d f16, qs u32[16], signs u32[8]", 18, code_range=(-62, 62))
IQ3_S = _block("iq3_s", 256, "d f16, qs u32[16], qh u8[8], signs u32[8], scales u8[4]", 21, code_range=(-15, 15))
IQ4_NL = _block("iq4_nl", 32, "d f16, qs u32[4]", 20, code_range=(-127, 113))
IQ4_XS = _block("iq4_xs", 256, "d f16, scales_h u16, scales_l u32, qs u32[32]", 23, code_range=(-127, 113))
TQ1_0 = _block("tq1_0", 256, "qs u32[12], qh u32, d f16", 34, code_range=(0, 2), zero=1)
TQ2_0 = _block("tq2_0", 256, "qs u32[16], d f16", 35, code_range=(0, 3), zero=1)
MXFP4 = _block("mxfp4", 32, "e u8, qs u32[4]", 39, code_range=(-12, 12))
NVFP4 = _block("nvfp4", 64, "d u8[4], qs u32[8]", 40, code_range=(-12, 12), scale_run=16)
Q1_0 = _block("q1_0", 128, "d f16, qs u32[4]", 41, code_range=(0, 2), zero=1)
Q2_0 = _block("q2_0", 64, "d f16, qs u32[4]", 42, code_range=(0, 3), zero=1)
# Activations, never in a file: value = d * (RADIX * high + low), two planes of 32 signed bytes each; s = d * the sum of RADIX * high + low;
# sums holds the sums of both halves of 16 of the high plane, then of the low one. See Note [planes] in kernels/mul_mat.py.
RADIX = 254
Q8_X = _block("q8_x", 32, "d f32, s f32, sums i16[4], qs u32[16]", code_range=(-127, 127), aliases=(Field("q", "i8", 64, 16),))

FLOATS = (F32, F16, BF16)
WEIGHT_BLOCKS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL,
                 IQ4_XS, TQ1_0, TQ2_0, MXFP4, NVFP4, Q1_0, Q2_0)
DTYPES: dict[str, DType] = {t.name: t for t in (*FLOATS, I8, I16, I32, I64, *WEIGHT_BLOCKS, Q8_X)}
_BY_GGML_ID = {t.ggml_id: t for t in DTYPES.values() if t.ggml_id is not None}


def by_ggml_id(type_id: int) -> DType | None:
    """The type with this id in GGUF files, or None where it is not known here."""
    return _BY_GGML_ID.get(type_id)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits (uint16): round to nearest even, NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    near = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 64, near).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) -> float32."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)
