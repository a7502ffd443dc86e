"""Packed integers times a row in pairs of float16 values (f16x2): each instruction processes two values of a word.

A word (`packed_int.py`) has as many pairs as it has values in its lower half. The two columns of a pair correspond to
values that are half a word apart:

    pair i of word w:   [ column w + interleave (i + values / 2) | column w + interleave i ]

One instruction combines two values with the exponent of 1024, one subtracts to -8 to 7, or -128 to 127, one applies
pairs of scales and minima, and one multiplies and adds. Two or four products are added in float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLER = tl.constexpr(1 / 64)  # factor if a row's largest magnitude is unknown: columns up to 2 ** 17 don't overflow

# Converts two float32 values to a pair.
PAIR = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
# Joins the lower halves, and the upper halves, of two words.
PAIRS = tl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")


def ptx_values(word: str) -> str:
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


def ptx_times(first: int) -> str:
    """PTX: multiply a, b, c and d by their activations, from argument `first` on; the sums are `low` and `high`"""
    return f"""mul.f16x2 a, a, ${first};
fma.rn.f16x2 a, b, ${first + 1}, a;
fma.rn.f16x2 a, c, ${first + 2}, a;
fma.rn.f16x2 a, d, ${first + 3}, a;
mov.b32 {{low, high}}, a;
"""


REGISTERS = """.reg .b32 a, b, c, d, t, upper, less, sixteenth, less72;
.reg .b16 low, high;
"""
ADDED = """cvt.f32.f16 first, low;
cvt.f32.f16 second, high;
add.f32 $0, first, second;
}"""
# The sum of a word's eight values, dequantised by pairs of scales and minima, times their activations.
TIMES_EIGHT = tl.constexpr(
    "{\n"
    + REGISTERS
    + ".reg .f32 first, second;\n"
    + ptx_values("$1")
    + """fma.rn.f16x2 a, a, $6, $10;
fma.rn.f16x2 b, b, $7, $11;
fma.rn.f16x2 c, c, $8, $12;
fma.rn.f16x2 d, d, $9, $13;
"""
    + ptx_times(2)
    + ADDED
)
# The same of a word's four values: its first and third byte, its second and fourth.
TIMES_FOUR = tl.constexpr(
    """{
.reg .b32 a, b, upper, less;
.reg .b16 low, high;
.reg .f32 first, second;
mov.b32 upper, 0x64646464;
mov.b32 less, 0xE480E480;
prmt.b32 a, $1, upper, 0x4240;
prmt.b32 b, $1, upper, 0x4341;
add.f16x2 a, a, less;
add.f16x2 b, b, less;
fma.rn.f16x2 a, a, $4, $6;
fma.rn.f16x2 b, b, $5, $7;
mul.f16x2 a, a, $2;
fma.rn.f16x2 a, b, $3, a;
mov.b32 {low, high}, a;
"""
    + ADDED
)


@triton.jit
def value_of(words, NUMBER: tl.constexpr, BITS: tl.constexpr = 4):
    return (((words >> (BITS * NUMBER)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))).to(tl.float32)


@triton.jit
def half_of(pair, NUMBER: tl.constexpr):
    return (pair >> (16 * NUMBER)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def as_pair(low, high, HAS_PTX: tl.constexpr):
    """Pack two columns of activations into one word of two float16, scaled down."""
    low, high = low.to(tl.float32) * SMALLER, high.to(tl.float32) * SMALLER
    if HAS_PTX:
        pair = tl.inline_asm_elementwise(PAIR, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    else:
        bits = high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        pair = bits | (low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    return pair


@triton.jit
def _weights_of(low, high, HAS_PTX: tl.constexpr):
    """Return the scales of a pair's two groups as pairs of scales and of minima (or zeros): int32 [lines, 1] each."""
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
    return scales[:, None], minima[:, None]


@triton.jit
def _weighed(words, pair, scales, minima, NUMBER: tl.constexpr, BITS: tl.constexpr):
    """Dequantise two of a word's values, multiply them by their activations, and add."""
    low = value_of(words, NUMBER, BITS) * half_of(scales, 0) + half_of(minima, 0)
    high = value_of(words, NUMBER + 16 // BITS, BITS) * half_of(scales, 1) + half_of(minima, 1)
    return low * half_of(pair, 0) + high * half_of(pair, 1)


@triton.jit
def times_weighed(
    words, pairs, found, SPAN: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, HAS_PTX: tl.constexpr
):  # fmt: skip
    """Multiply words [lines, SPAN] by pairs, [1, SPAN] or per line, with the groups' scales `found` [lines] → sums over
    each word's values: float32 [lines, SPAN]."""
    if BITS == 4:
        scales_a, minima_a = _weights_of(found[0], found[4 * SPAN // GROUP], HAS_PTX)
        scales_b, minima_b = _weights_of(found[SPAN // GROUP], found[5 * SPAN // GROUP], HAS_PTX)
        scales_c, minima_c = _weights_of(found[2 * SPAN // GROUP], found[6 * SPAN // GROUP], HAS_PTX)
        scales_d, minima_d = _weights_of(found[3 * SPAN // GROUP], found[7 * SPAN // GROUP], HAS_PTX)
    else:
        scales_a, minima_a = _weights_of(found[0], found[2 * SPAN // GROUP], HAS_PTX)
        scales_b, minima_b = _weights_of(found[SPAN // GROUP], found[3 * SPAN // GROUP], HAS_PTX)
    if HAS_PTX and BITS == 4:
        sums = tl.inline_asm_elementwise(
            TIMES_EIGHT, "=f,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [words, pairs[0], pairs[1], pairs[2], pairs[3],
             scales_a, scales_b, scales_c, scales_d, minima_a, minima_b, minima_c, minima_d],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    elif HAS_PTX:
        sums = tl.inline_asm_elementwise(
            TIMES_FOUR, "=f,r,r,r,r,r,r,r", [words, pairs[0], pairs[1], scales_a, scales_b, minima_a, minima_b],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        sums = _weighed(words, pairs[0], scales_a, minima_a, 0, BITS)
        sums += _weighed(words, pairs[1], scales_b, minima_b, 1, BITS)
        if BITS == 4:
            sums += _weighed(words, pairs[2], scales_c, minima_c, 2, BITS)
            sums += _weighed(words, pairs[3], scales_d, minima_d, 3, BITS)
    return sums
