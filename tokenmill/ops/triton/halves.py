"""A single row times a 4-bit matrix, without the matrix units: the time is what reading the matrix once takes, if a
value costs few instructions.

The row's columns are divided by a scale, one a span, rounded to float16, and kept in pairs that lie as the values of a
word do (see `words`; spans of 32 words, 256 columns):

    pair i of word w:   [ column w + 32 (i + 4) | column w + 32 i ]        i = 0 to 3

So one instruction puts two of a word's values behind the exponent of 1024, one makes them -8 to 7, and one multiplies
and adds. Four products at a time are added up in float16, in groups of 128 columns that share a scale; then in float32.
Where groups are smaller or have minima, one instruction more makes two weights of two values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.kernel import kernel
from tokenmill.ops.triton.overlap import arrivals, launch_options, let_next_begin, wait_for_previous
from tokenmill.ops.triton.sizes import cdiv
from tokenmill.ops.triton.strips import join_splits, scales_from, share_of_strip, splits_for
from tokenmill.ops.triton.words import has_ptx

SPAN = 32
LARGEST = tl.constexpr(1024.0)  # 32 times as much is a float16 number too
SMALLER = tl.constexpr(1 / 64)  # where nobody has looked for the largest: up to 2 ** 17 of a row that is not in halves

# Two float32 numbers as a pair.
PAIR = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
# The lower and the upper halves of two numbers.
PAIRS = tl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")


def _values(word: str) -> str:
    """PTX: the eight values of a word as pairs a, b, c, d"""
    return f"""mov.b32 upper, 0x64006400;
mov.b32 less, 0xE408E408;
mov.b32 sixteenth, 0x2C002C00;
mov.b32 less72, 0xD480D480;
shr.u32 t, {word}, 8;
lop3.b32 a, {word}, 0x000F000F, upper, 0xEA;
lop3.b32 b, {word}, 0x00F000F0, upper, 0xEA;
lop3.b32 c, t, 0x000F000F, upper, 0xEA;
lop3.b32 d, t, 0x00F000F0, upper, 0xEA;
add.f16x2 a, a, less;
fma.rn.f16x2 b, b, sixteenth, less72;
add.f16x2 c, c, less;
fma.rn.f16x2 d, d, sixteenth, less72;
"""


def _times(first: int) -> str:
    """PTX: a, b, c and d times their halves, which begin at that argument; the sums are `low` and `high`"""
    return f"""mul.f16x2 a, a, ${first};
fma.rn.f16x2 a, b, ${first + 1}, a;
fma.rn.f16x2 a, c, ${first + 2}, a;
fma.rn.f16x2 a, d, ${first + 3}, a;
mov.b32 {{low, high}}, a;
"""


REGISTERS = """.reg .b32 a, b, c, d, t, upper, less, sixteenth, less72;
.reg .b16 low, high;
"""
# Sums of the lower and of the upper four values of a word times their halves.
TIMES_HALVES = tl.constexpr(
    "{\n"
    + REGISTERS
    + _values("$2")
    + _times(3)
    + """cvt.f32.f16 $0, low;
cvt.f32.f16 $1, high;
}"""
)
# The sum of a word's eight values, weighed by pairs of scales and minima, times their halves.
TIMES_WEIGHED = tl.constexpr(
    "{\n"
    + REGISTERS
    + ".reg .f32 first, second;\n"
    + _values("$1")
    + """fma.rn.f16x2 a, a, $6, $10;
fma.rn.f16x2 b, b, $7, $11;
fma.rn.f16x2 c, c, $8, $12;
fma.rn.f16x2 d, d, $9, $13;
"""
    + _times(2)
    + """cvt.f32.f16 first, low;
cvt.f32.f16 second, high;
add.f32 $0, first, second;
}"""
)


class Halves(NamedTuple):
    pairs: torch.Tensor  # int32 [1, columns / 2]
    scales: torch.Tensor  # float32 [columns / 256]


@triton.jit
def store_halves(values, pairs, scales, first, size, BLOCK: tl.constexpr):
    """Columns [first, first + BLOCK) of a row, float32 [BLOCK]"""
    spans = tl.reshape(values, (BLOCK // 256, 256))
    factors = tl.maximum(tl.max(tl.abs(spans), axis=1) / LARGEST, 1e-30)
    numbers = tl.arange(0, BLOCK // 256)
    tl.store(scales + first // 256 + numbers, factors, mask=first + numbers * 256 < size)
    bits = (spans * (1.0 / factors)[:, None]).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    low, high = tl.split(tl.permute(tl.reshape(bits, (BLOCK // 256, 2, 128)), (0, 2, 1)))
    packed = tl.reshape((high << 16) | (low & 0xFFFF), (BLOCK // 2,))
    places = tl.arange(0, BLOCK // 2)
    tl.store(pairs + first // 2 + places, packed, mask=first + 2 * places < size)


def empty_halves(size: int, device: torch.device) -> Halves:
    pairs = torch.empty(1, size // 2, dtype=torch.int32, device=device)
    return Halves(pairs, torch.empty(size // 256, dtype=torch.float32, device=device))


@triton.jit
def _value(words, NUMBER: tl.constexpr):
    return (((words >> (4 * NUMBER)) & 15) - 8).to(tl.float32)


@triton.jit
def _half(pair, NUMBER: tl.constexpr):
    return (pair >> (16 * NUMBER)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _times_halves(words, a, b, c, d, HAS_PTX: tl.constexpr):
    """words [STRIP, SPAN], pairs [SPAN] → sums of the first group of columns and of the second, [STRIP, SPAN] each"""
    if HAS_PTX:
        first, second = tl.inline_asm_elementwise(
            TIMES_HALVES, "=f,=f,r,r,r,r,r", [words, a[None, :], b[None, :], c[None, :], d[None, :]],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first = _value(words, 0) * _half(a, 0)[None, :] + _value(words, 1) * _half(b, 0)[None, :]
        first += _value(words, 2) * _half(c, 0)[None, :] + _value(words, 3) * _half(d, 0)[None, :]
        second = _value(words, 4) * _half(a, 1)[None, :] + _value(words, 5) * _half(b, 1)[None, :]
        second += _value(words, 6) * _half(c, 1)[None, :] + _value(words, 7) * _half(d, 1)[None, :]
    return first, second


@triton.jit
def _weights_of(found, NUMBER: tl.constexpr, GROUP: tl.constexpr, HAS_PTX: tl.constexpr):
    """Pair NUMBER of the scales of a span's groups, and of their minima: int32 [STRIP] each"""
    low, high = found[NUMBER * 32 // GROUP], found[(NUMBER + 4) * 32 // GROUP]
    has_minima: tl.constexpr = low.dtype == tl.int32
    if not has_minima:
        low, high = low.to(tl.int16, bitcast=True).to(tl.int32), high.to(tl.int16, bitcast=True).to(tl.int32)
    if HAS_PTX:
        scales, minima = tl.inline_asm_elementwise(
            PAIRS, "=r,=r,r,r", [low, high], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        scales, minima = (high << 16) | (low & 0xFFFF), (high & -65536) | ((low >> 16) & 0xFFFF)
    if not has_minima:
        minima = tl.zeros_like(low)
    return scales, minima


@triton.jit
def _weighed(words, pairs, scales, minima, NUMBER: tl.constexpr):
    """Two of a word's values, as weights, times their halves, added up"""
    low = _value(words, NUMBER) * _half(scales, 0)[:, None] + _half(minima, 0)[:, None]
    high = _value(words, NUMBER + 4) * _half(scales, 1)[:, None] + _half(minima, 1)[:, None]
    return low * _half(pairs, 0)[None, :] + high * _half(pairs, 1)[None, :]


@triton.jit
def _times_weighed(words, a, b, c, d, found, GROUP: tl.constexpr, HAS_PTX: tl.constexpr):
    """The same where values become weights first, by what was `found` of the groups' scales → sums of all columns,
    [STRIP, SPAN]"""
    scales_a, minima_a = _weights_of(found, 0, GROUP, HAS_PTX)
    scales_b, minima_b = _weights_of(found, 1, GROUP, HAS_PTX)
    scales_c, minima_c = _weights_of(found, 2, GROUP, HAS_PTX)
    scales_d, minima_d = _weights_of(found, 3, GROUP, HAS_PTX)
    if HAS_PTX:
        sums = tl.inline_asm_elementwise(
            TIMES_WEIGHED, "=f,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [words, a[None, :], b[None, :], c[None, :], d[None, :],
             scales_a[:, None], scales_b[:, None], scales_c[:, None], scales_d[:, None],
             minima_a[:, None], minima_b[:, None], minima_c[:, None], minima_d[:, None]],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        sums = _weighed(words, a, scales_a, minima_a, 0) + _weighed(words, b, scales_b, minima_b, 1)
        sums += _weighed(words, c, scales_c, minima_c, 2) + _weighed(words, d, scales_d, minima_d, 3)
    return sums


@triton.jit
def _pair(x, places, NUMBER: tl.constexpr, SPAN: tl.constexpr, HAS_PTX: tl.constexpr):
    """Pair NUMBER of each word, made of the row itself"""
    low = tl.load(x + NUMBER * SPAN + places).to(tl.float32) * SMALLER
    high = tl.load(x + (NUMBER + 4) * SPAN + places).to(tl.float32) * SMALLER
    if HAS_PTX:
        pair = tl.inline_asm_elementwise(PAIR, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    else:
        bits = high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        pair = bits | (low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    return pair


@kernel
def _one_row(
    x, row_scales, weight, scales, bias, out, parts, arrived, num_out, num_in,
    STRIP: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, IS_HALVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr, HAS_PTX: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """A span at a time: so little of x that every thread reads what it needs itself, and the loop has no barrier.
    IS_HALVED: x are pairs; else the row itself, whose halves every program makes anew with a fixed scale.
    GROUP columns share a scale; where they are 128 without minima, scales lie as the matrix does: [rows, groups]."""
    let_next_begin(OVERLAPS)
    places = tl.arange(0, SPAN)
    weighs: tl.constexpr = GROUP < 128 or scales.dtype.element_ty == tl.int32
    groups: tl.constexpr = 8 * SPAN // GROUP
    row_words = num_in // 8
    if weighs:  # then a thread should have many words of few lines
        row_words = tl.multiple_of(row_words, SPAN)
    strip, stands, low, high = share_of_strip(row_words, STRIP, SPAN, SPLITS)
    lines = weight + (stands % num_out).to(tl.int64)[:, None] * row_words + places[None, :]
    line_scales = scales + (stands % num_out if weighs else (stands % num_out) * (num_in // 128))
    words = tl.load(lines + low, mask=low + places[None, :] < high, other=0)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((STRIP, SPAN), tl.float32)
    if weighs:
        scales_here = scales_from(line_scales + low // SPAN * groups * num_out, num_out, groups)
    for start in range(low, high, SPAN):
        following = tl.load(lines + start + SPAN, mask=start + SPAN + places[None, :] < high, other=0)
        if IS_HALVED:
            here = x + start * 4 + places
            a, b, c, d = tl.load(here), tl.load(here + SPAN), tl.load(here + 2 * SPAN), tl.load(here + 3 * SPAN)
            row_scale = tl.load(row_scales + start // SPAN)
        else:
            here = x + start * 8
            a, b = _pair(here, places, 0, SPAN, HAS_PTX), _pair(here, places, 1, SPAN, HAS_PTX)
            c, d = _pair(here, places, 2, SPAN, HAS_PTX), _pair(here, places, 3, SPAN, HAS_PTX)
            row_scale = 1.0 / SMALLER
        if weighs:
            turn = tl.minimum(start + SPAN, high - SPAN) // SPAN
            scales_next = scales_from(line_scales + turn * groups * num_out, num_out, groups)
            sums += _times_weighed(words, a, b, c, d, scales_here, GROUP, HAS_PTX) * row_scale
            scales_here = scales_next
        else:
            first, second = _times_halves(words, a, b, c, d, HAS_PTX)
            group = line_scales + start // SPAN * 2
            sums += first * (tl.load(group).to(tl.float32) * row_scale)[:, None]
            sums += second * (tl.load(group + 1).to(tl.float32) * row_scale)[:, None]
        words = following
    total = tl.sum(sums, axis=1)[:, None]
    is_last = True
    if SPLITS > 1:
        total, is_last = join_splits(total, parts, arrived, strip, STRIP, 1, SPLITS)
    if is_last:
        target = stands[:, None]
        if HAS_BIAS:
            total += tl.load(bias + target, mask=target < num_out, other=0.0).to(tl.float32)
        tl.store(out + target, total.to(out.dtype.element_ty), mask=target < num_out)


@dataclass(frozen=True)
class Cut:
    """How a product is cut into programs."""

    strip: int
    splits: int
    warps: int = 4


def cut_for(num_out: int, num_in: int) -> Cut:
    """As measured on an H200."""
    return Cut(64, splits_for(num_out, num_in // 256, 384))


def halves_product(
    row: Halves | torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    cut: Cut | None = None,
) -> torch.Tensor:
    """A row in halves, or a plain one [1, columns] of moderate size; words int32 [num_out, columns / 8], scales
    [groups, num_out] (see `words`), or [num_out, groups] where these are of 128 columns and have no minima
    → [1, num_out]"""
    num_out, num_in, device = len(words), 8 * words.shape[1], words.device
    cut = cut or cut_for(num_out, num_in)
    strips = cdiv(num_out, cut.strip)
    out = torch.empty(1, num_out, dtype=dtype, device=device)
    parts = arrived = out
    if cut.splits > 1:
        parts = torch.empty(strips * cut.splits * cut.strip, dtype=torch.float32, device=device)
        arrived = arrivals(device)
    _one_row[(strips, cut.splits)](
        *(row if isinstance(row, Halves) else (row.contiguous(), out)), words, scales,
        bias if bias is not None else out, out, parts, arrived, num_out, num_in,
        cut.strip, SPAN, cut.splits, isinstance(row, Halves), bias is not None, group, has_ptx(),
        num_warps=cut.warps, **launch_options(),
    )  # fmt: skip
    return out
