"""Matrices of 4-bit or 8-bit integers packed in 32-bit words, and their expansion in kernels.

A matrix row is cut into spans of `interleave` words, s for short. The i-th value of word w of a span, counted from the
lowest bits, is column i * s + w of the span, so that the i-th values of all words are neighbouring columns:

    word w, 4 bits per value:   [ column w + 7 s | ... | w + 2 s | w + s | w ]

Values are -8 to 7, stored as 0 to 15, or -128 to 127, stored as 0 to 255. A weight is its value times the scale of its
group of columns, plus the group's minimum if there is one; scale and minimum are then a pair in a 32-bit word. Scales
of neighbouring rows are neighbours, since a program loads them for many rows at a time:

    scales [groups, rows]    floats; or int32:  [ minimum | scale ], float16 each
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.launch.kernel import cdiv, kernel

FOUR_BITS = tl.constexpr("""{
.reg .b32 t;
prmt.b32 t, $8, $9, 0x0400;
lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA;
shr.u32 t, t, 4;
lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA;
prmt.b32 t, $8, $9, 0x0501;
lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA;
shr.u32 t, t, 4;
lop3.b32 $3, t, 0x000F000F, 0x43004300, 0xEA;
prmt.b32 t, $8, $9, 0x0602;
lop3.b32 $4, t, 0x000F000F, 0x43004300, 0xEA;
shr.u32 t, t, 4;
lop3.b32 $5, t, 0x000F000F, 0x43004300, 0xEA;
prmt.b32 t, $8, $9, 0x0703;
lop3.b32 $6, t, 0x000F000F, 0x43004300, 0xEA;
shr.u32 t, t, 4;
lop3.b32 $7, t, 0x000F000F, 0x43004300, 0xEA;
}""")


# A byte combined with the upper bits of 2^23 in float32 is a value that is 2^23 + 128 too large; the difference has at
# most 8 significant bits, so its upper half is the same number in bfloat16. The i-th bytes of two words become output
# i.
EIGHT_BITS = tl.constexpr(
    "{ .reg .b32 s, t;"
    + "".join(
        f"prmt.b32 s, $4, 0x4B000000, 0x744{i}; prmt.b32 t, $5, 0x4B000000, 0x744{i};"
        "sub.f32 s, s, 0f4B000080; sub.f32 t, t, 0f4B000080;"
        f"prmt.b32 ${i}, s, t, 0x7632;"
        for i in range(4)
    )
    + "}"
)


@triton.jit
def _nibble(words, NUMBER: tl.constexpr):
    return (((words >> (4 * NUMBER)) & 15) | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def expand_4_bits(words, COMPUTE: tl.constexpr, HAS_PTX: tl.constexpr):
    """Return tensors of the words' shape with their first, second, … values; two words at a time if PTX is available.
    Four bits combined with the upper bits of 128 in bfloat16 are a value that is 136 too large."""
    if HAS_PTX:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            FOUR_BITS, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], is_pure=True, pack=2,
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        )  # fmt: skip
    else:
        a, b, c, d = _nibble(words, 0), _nibble(words, 1), _nibble(words, 2), _nibble(words, 3)
        e, f, g, h = _nibble(words, 4), _nibble(words, 5), _nibble(words, 6), _nibble(words, 7)
    return (
        a.to(COMPUTE) - 136.0, b.to(COMPUTE) - 136.0, c.to(COMPUTE) - 136.0, d.to(COMPUTE) - 136.0,
        e.to(COMPUTE) - 136.0, f.to(COMPUTE) - 136.0, g.to(COMPUTE) - 136.0, h.to(COMPUTE) - 136.0,
    )  # fmt: skip


@triton.jit
def _byte(words, NUMBER: tl.constexpr):
    return ((words >> (8 * NUMBER)) & 255).to(tl.float32) - 128.0


@triton.jit
def expand_8_bits(words, COMPUTE: tl.constexpr, HAS_PTX: tl.constexpr):
    """The same for words of four values"""
    if HAS_PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            EIGHT_BITS, "=r,=r,=r,=r,r,r", [words], is_pure=True, pack=2,
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        )  # fmt: skip
    else:
        a, b, c, d = _byte(words, 0), _byte(words, 1), _byte(words, 2), _byte(words, 3)
    return a.to(COMPUTE), b.to(COMPUTE), c.to(COMPUTE), d.to(COMPUTE)


@triton.jit
def expand_values(words, BITS: tl.constexpr, COMPUTE: tl.constexpr, HAS_PTX: tl.constexpr):
    return expand_4_bits(words, COMPUTE, HAS_PTX) if BITS == 4 else expand_8_bits(words, COMPUTE, HAS_PTX)


@triton.jit
def scale_of(found):
    """Return scales as loaded in float32."""
    if found.dtype == tl.int32:
        found = found.to(tl.int16).to(tl.float16, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def minimum_of(found):
    return (found >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


def paired(scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """Join scales and minima, float32 [..., groups] each, to pairs, int32 [..., groups]."""
    return torch.stack((scales, minima), dim=-1).to(torch.float16).view(torch.int32).squeeze(-1)


def unpaired(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scales, and the minima if there are any: the inverse of `paired`."""
    if scales.dtype != torch.int32:
        return scales, None
    low, high = scales.contiguous().unsqueeze(-1).view(torch.float16).unbind(-1)
    return low, high


def has_ptx() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None


def pack_ints(values: torch.Tensor, interleave: int, bits: int) -> torch.Tensor:
    """Pack stored values uint8 [rows, columns] → int32 [rows, columns * bits / 32]."""
    spans = values.view(len(values), -1, 32 // bits, interleave).transpose(2, 3)  # [rows, spans, word, i]
    if bits == 4:
        spans = spans[..., 0::2] | (spans[..., 1::2] << 4)
    return spans.contiguous().view(torch.int32).flatten(1)


def unpack_ints(words: torch.Tensor, interleave: int, bits: int) -> torch.Tensor:
    """Unpack words to stored values, uint8 [rows, columns]: the inverse of `pack_ints`."""
    values = words.view(torch.uint8).view(len(words), -1, interleave, 4)
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), dim=4).flatten(3)
    return values.transpose(2, 3).reshape(len(words), -1)


@kernel
def _dequantize_packed(
    words, scales, out, num_out, num_in, scale_stride,
    ROWS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
) -> None:  # fmt: skip
    """One span of ROWS rows per program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    span, indices = tl.program_id(1), tl.arange(0, WORDS)
    values_each: tl.constexpr = 32 // BITS
    is_row, begins = (rows < num_out)[:, None], rows.to(tl.int64)[:, None] * num_in
    found = tl.load(words + begins // values_each + span * WORDS + indices[None, :], mask=is_row, other=0)
    for i in tl.static_range(values_each):
        column = (span * values_each + i) * WORDS
        if GROUP < WORDS:
            group = (column + indices)[None, :] // GROUP
            scale = tl.load(scales + group * scale_stride + rows[:, None], mask=is_row, other=0)
        else:
            scale = tl.load(scales + column // GROUP * scale_stride + rows, mask=rows < num_out, other=0)[:, None]
        stored = (found >> (BITS * i)) & ((1 << BITS) - 1)
        value = (stored - (1 << (BITS - 1))).to(tl.float32) * scale_of(scale)
        if scales.dtype.element_ty == tl.int32:
            value += minimum_of(scale)
        tl.store(out + begins + column + indices[None, :], value.to(out.dtype.element_ty), mask=is_row)


def dequantize_packed(
    words: torch.Tensor, scales: torch.Tensor, interleave: int, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    """Expand a matrix to [num_out, num_in], for products of many rows; rows of `scales` [groups, num_out] may be
    strided."""
    num_out, num_in = words.shape[0], words.shape[1] * 32 // bits
    out = torch.empty(num_out, num_in, dtype=dtype, device=words.device)
    group = num_in // scales.shape[0]
    _dequantize_packed[(cdiv(num_out, 16), words.shape[1] // interleave)](
        words, scales, out, num_out, num_in, scales.stride(0), 16, interleave, group, bits, num_warps=4
    )
    return out
