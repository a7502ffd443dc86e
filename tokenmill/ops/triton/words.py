"""Matrices of 4 bits a value, as words of 32 bits, and how the values come out of them.

A row is cut into spans of a fixed number of words. Bits [4 i, 4 (i + 1)) of word w of a span are its column
i * span + w, so that the i-th values of all its words are neighbours, as the columns they multiply:

    word w:   [ column w + 7 span | ... | w + 2 span | w + span | w ]

Values are -8 to 7, stored as 0 to 15.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.kernel import kernel

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


@triton.jit
def _nibble(words, NUMBER: tl.constexpr):
    return (((words >> (4 * NUMBER)) & 15) | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def expand(words, COMPUTE: tl.constexpr, HAS_PTX: tl.constexpr):
    """Tensors of the words' shape with their first, second ... values; two words at a time where PTX is understood.
    Four bits behind the upper bits of 128 in bfloat16 are a value 136 too large."""
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


def has_ptx() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None


def packed_words(values: torch.Tensor, span: int) -> torch.Tensor:
    """values uint8 [rows, columns] of 0 to 15 → int32 [rows, columns / 8]"""
    spans = values.view(len(values), -1, 8, span).transpose(2, 3)  # [rows, spans, word, i]
    return (spans[..., 0::2] | (spans[..., 1::2] << 4)).contiguous().view(torch.int32).flatten(1)


def unpacked_words(words: torch.Tensor, span: int) -> torch.Tensor:
    """The inverse: uint8 [rows, columns]"""
    parts = words.view(torch.uint8).view(len(words), -1, span, 4)
    values = torch.stack((parts & 15, parts >> 4), dim=4).flatten(3)
    return values.transpose(2, 3).reshape(len(words), -1)


@kernel
def _expand_4bit(words, scales, out, num_in, WORDS: tl.constexpr, GROUP: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    places = tl.arange(0, WORDS)
    found = tl.load(words + row * (num_in // 8) + span * WORDS + places)
    for i in tl.static_range(8):
        column = (span * 8 + i) * WORDS
        scale = tl.load(scales + row * (num_in // GROUP) + column // GROUP).to(tl.float32)
        value = (((found >> (4 * i)) & 15) - 8).to(tl.float32) * scale
        tl.store(out + row * num_in + column + places, value.to(out.dtype.element_ty))


def expand_4bit(words: torch.Tensor, scales: torch.Tensor, span: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_out, num_in], for products of many rows"""
    num_out, num_in = words.shape[0], words.shape[1] * 8
    out = torch.empty(num_out, num_in, dtype=dtype, device=words.device)
    group = num_in // scales.shape[1]
    _expand_4bit[(num_out, num_in // (8 * span))](words, scales, out, num_in, span, group, num_warps=1)
    return out
