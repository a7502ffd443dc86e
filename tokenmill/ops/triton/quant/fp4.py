"""MXFP4 and NVFP4 matrices: 4-bit floats (e2m1) with a power of two per 32 columns (MXFP4), or an 8-bit scale per 16
columns (NVFP4).

A value has a sign, two exponent bits and one mantissa bit (0, 0.5, 1, 1.5, 2, 3, 4, 6). A row is cut into chunks of 64
columns. Word w of a chunk, 16 bits, has one column of each quarter: w, w + 16, w + 32 and w + 48, so that the i-th
values of all words are neighbouring columns.

With its sign at bfloat16's sign bit, its exponent in the lowest bits of bfloat16's exponent and its mantissa in the
highest mantissa bit, every value is 2 ** 126 too small; the scale compensates for that. Every weight is then a bfloat16
number, so nothing is rounded. The first three values of a word (a, b, c) need at most one shift for that; the fourth
(d) has the remaining bits:

    bit of a word   15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
                    a-  d-  d   b-  d   d   c-  a   a   a   b   b   b   c   c   c       - sign

The two scales of a chunk are one 32-bit word; those of neighbouring rows are neighbours:

    scales [chunks, rows]:   [ second | first ], 2 ** 126 * scale in bfloat16 each

NVFP4 has a scale per quarter of a chunk, that is for one of a word's four values. Its scales (e4m3, none negative) are
stored in a byte each, with five exponent bits, so that none is subnormal, and three mantissa bits: shifted to
bfloat16's place, a constant added to the exponent makes each 2 ** 118 times as large. Weights are then bfloat16 numbers
too, 2 ** 8 too small, for which a factor per row compensates, together with the file's scale of the whole matrix:

    scales [chunks, rows]:   [ fourth | third | second | first ], a byte each        row_factors [rows]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.arch.block_formats import BLOCK_TYPES
from tokenmill.arch.packed_formats import MX_CHUNK, MX_GROUP, NV_GROUP
from tokenmill.ops.triton.gemm.product import MXFP4, NVFP4, WeightForm
from tokenmill.ops.triton.launch.kernel import cdiv, kernel
from tokenmill.ops.triton.quant.packed_int import has_ptx
from tokenmill.ops.triton.quant.quantized import mixed

LANES = tl.constexpr(16)  # words per chunk
MAX_EXPONENT = 128  # of a file's scale: times 2 ** 126 it is still a bfloat16 number
RAISED = 126  # added to the exponent of a file's scale
BLOCK_BYTES = 17  # per block in a file: an exponent, then 16 bytes whose low nibbles are the first half of the group
ROWS_AT_ONCE = 8192
NV_RAISED = 118  # NVFP4's scales are 2 ** 118 times as large in kernels
NV_EXPONENT = tl.constexpr((NV_RAISED + 127 - 10) * 0x00800080)  # added to two of them, 2 ** (exponent - 10)
GROUPS_OF_16 = tl.constexpr(NV_GROUP)


@dataclass(frozen=True)
class Fp4Words:
    """4-bit floats in 16-bit words, in the order of the subclass, and their scales."""

    words: torch.Tensor  # int16 [rows, columns / 4]
    scales: torch.Tensor
    row_factors: torch.Tensor | None = None  # float32 [rows]: NVFP4

    @property
    def num_columns(self) -> int:
        return 4 * self.words.shape[1]

    @property
    def group(self) -> int:
        """Columns that share a scale"""
        return MX_GROUP if self.row_factors is None else NV_GROUP

    @property
    def factors(self) -> torch.Tensor:
        """Return the row factors, or a placeholder for kernels that don't read them."""
        return self.scales if self.row_factors is None else self.row_factors

    def form(self, dtype: torch.dtype) -> WeightForm:
        """Form of this matrix in products with activations of `dtype`."""
        return MXFP4[dtype] if self.row_factors is None else NVFP4[dtype]


class Fp4Matrix(Fp4Words):
    """An MXFP4 or NVFP4 matrix in chunks of 64 columns; scales int32 [columns / 64, rows]."""

    @property
    def num_chunks(self) -> int:
        return len(self.scales)


def fp4_from_blocks(blocks: torch.Tensor, quant: str = "MXFP4") -> Fp4Matrix:
    """Pack a file's blocks, uint8 [rows, bytes]."""
    return _from_mxfp4(blocks) if quant == "MXFP4" else _from_nvfp4(blocks, quant)


def _from_mxfp4(blocks: torch.Tensor) -> Fp4Matrix:
    num_rows, num_columns = blocks.shape[0], blocks.shape[1] // BLOCK_BYTES * MX_GROUP
    words = torch.empty(num_rows, num_columns // 4, dtype=torch.int16, device=blocks.device)
    scales = torch.empty(num_columns // MX_CHUNK, num_rows, dtype=torch.int32, device=blocks.device)
    for first in range(0, num_rows, ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        groups = blocks[part].reshape(-1, num_columns // MX_GROUP, BLOCK_BYTES)
        raised = (groups[..., 0].int() + RAISED).view(-1, num_columns // MX_CHUNK, 2) << 7
        scales[:, part] = (raised[..., 0] | (raised[..., 1] << 16)).t()
        words[part] = _words_of(groups[..., 1:])
    return Fp4Matrix(words, scales)


def _from_nvfp4(blocks: torch.Tensor, quant: str) -> Fp4Matrix:
    """Pack NV4 (scales are multiplied by the matrix's scale) or NV4D (divided by it); two scales per block."""
    block_bytes = BLOCK_TYPES[quant].block_bytes
    num_rows, num_columns = blocks.shape[0], blocks.shape[1] // block_bytes * MX_GROUP
    words = torch.empty(num_rows, num_columns // 4, dtype=torch.int16, device=blocks.device)
    scales = torch.empty(num_columns // MX_CHUNK, num_rows, dtype=torch.int32, device=blocks.device)
    table = normal_scales().to(blocks.device)
    for first in range(0, num_rows, ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        groups = blocks[part].reshape(-1, num_columns // MX_GROUP, block_bytes)
        found = table[groups[..., 4:6].long() & 127]
        scales[:, part] = found.reshape(len(groups), -1, 4).contiguous().view(torch.int32).squeeze(2).t()
        # A scale of 0 can't be represented as a normal number: its weights become 0 instead.
        is_zero = (groups[..., 4:6] & 127 == 0).repeat_interleave(NV_GROUP, dim=2)
        words[part] = _words_of(groups[..., 6:], is_zero)
    whole = blocks.view(num_rows, -1, block_bytes)[:, 0, :4].contiguous().view(torch.float32).squeeze(1)
    lowered = 2.0 ** (RAISED - NV_RAISED)
    return Fp4Matrix(words, scales, lowered / whole if quant == "NV4D" else lowered * whole)


def normal_scales() -> torch.Tensor:
    """Return the 128 non-negative e4m3 numbers with five exponent bits: uint8, 2 ** (exponent - 10) * 1.mmm."""
    numbers = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    mantissas, exponents = torch.frexp(numbers)  # mantissas in [0.5, 1)
    made = ((exponents + 9) << 3) | (mantissas * 16 - 8).int()
    return torch.where(numbers > 0, made, torch.zeros_like(made)).to(torch.uint8)


def _words_of(packed: torch.Tensor, is_zero: torch.Tensor | None = None) -> torch.Tensor:
    """Reorder nibbles of blocks of 32 columns, uint8 [rows, blocks, 16] → int16 [rows, words]."""
    codes = torch.cat((packed & 15, packed >> 4), dim=2).to(torch.int16)
    codes = codes if is_zero is None else codes.masked_fill_(is_zero, 0)
    return encoded_words(codes.view(len(packed), -1, 4, MX_CHUNK // 4).unbind(2)).flatten(1)


def encoded_words(codes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Encode four tensors of 4-bit codes, int16, as words."""
    (a, b, c, d), (a_sign, b_sign, c_sign, d_sign) = [one & 7 for one in codes], [one >> 3 for one in codes]
    signs = (a_sign << 15) | (b_sign << 12) | (c_sign << 9) | (d_sign << 14)
    return signs | (a << 6) | (b << 3) | c | ((d >> 2) << 13) | ((d & 3) << 10)


def has_fitting_scales(blocks: torch.Tensor, quant: str = "MXFP4") -> bool:
    """Return whether the kernels can represent all scales of a file's blocks, uint8 [..., bytes]."""
    each = blocks.view(*blocks.shape[:-1], -1, BLOCK_TYPES[quant].block_bytes)
    if quant == "MXFP4":
        return bool((each[..., 0] <= MAX_EXPONENT).all())
    return not bool((each[..., 4:6] & 128).any())


def interleaved_fp4(first: Fp4Matrix, second: Fp4Matrix, num_parts: int) -> Fp4Matrix:
    """Interleave two matrices in parts of rows, alternately: gates and ups of experts."""
    words, scales = mixed(first.words, second.words, num_parts), mixed(first.scales, second.scales, num_parts, dim=1)
    if first.row_factors is None or second.row_factors is None:
        return Fp4Matrix(words, scales)
    return Fp4Matrix(words, scales, mixed(first.row_factors, second.row_factors, num_parts))


def ptx_fp4(group: int = MX_GROUP) -> str:
    """PTX: the four values of two words ($4) times their scales, in pairs. The scales of the first word are two in $5,
    those of the second in $6; if 16 columns share a scale, two more are in $7 and $8."""
    scales = {MX_GROUP: ("first", "first", "second", "second"), NV_GROUP: ("first", "second", "third", "fourth")}
    third = "prmt.b32 third, $7, $8, 0x5410;\nprmt.b32 fourth, $7, $8, 0x7632;\n" if group == NV_GROUP else ""
    more = ", third, fourth" if group == NV_GROUP else ""
    return f"""{{
.reg .b32 first, second{more};
prmt.b32 first, $5, $6, 0x5410;
prmt.b32 second, $5, $6, 0x7632;
{third}{ptx_weights(scales[group])}}}"""


def ptx_weights(scales: Sequence[str]) -> str:
    """PTX: the four values of two words ($4), in pairs ($0 to $3), times a pair of scales each"""
    a, b, c, d = scales
    return f""".reg .b32 t, u, v, zero;
mov.b32 zero, 0x80008000;
and.b32 t, $4, 0x81C081C0;
fma.rn.bf16x2 $0, t, {a}, zero;
shl.b32 t, $4, 3;
and.b32 t, t, 0x81C081C0;
fma.rn.bf16x2 $1, t, {b}, zero;
shl.b32 t, $4, 6;
and.b32 t, t, 0x81C081C0;
fma.rn.bf16x2 $2, t, {c}, zero;
shr.u32 t, $4, 5;
and.b32 t, t, 0x01000100;
shr.u32 u, $4, 4;
lop3.b32 t, u, 0x00C000C0, t, 0xEA;
shl.b32 v, $4, 1;
lop3.b32 t, v, 0x80008000, t, 0xEA;
fma.rn.bf16x2 $3, t, {d}, zero;
"""


PTX_FP4 = tl.constexpr(ptx_fp4())
PTX_FP4_TYPES = tl.constexpr("=r,=r,=r,=r,r,r,r")
PTX_NVFP4 = tl.constexpr(ptx_fp4(NV_GROUP))
PTX_NVFP4_TYPES = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r")


@triton.jit
def _times_scale(code, sign, scale):
    """Multiply a 3-bit value and its sign, placed in float32 bits, by its scale."""
    bits = (code << 22) | (sign << 31)
    return (bits.to(tl.float32, bitcast=True) * scale.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _low_of(pairs):
    """Return the first of two bfloat16 values."""
    return pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _high_of(pairs):
    return (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def scale_pairs(scales):
    """Return NVFP4's four scales as two bfloat16 pairs."""
    first = (((scales & 0xFF) << 4) | ((scales & 0xFF00) << 12)) + NV_EXPONENT
    second = (((scales >> 12) & 0xFF0) | ((scales >> 4) & 0x0FF00000)) + NV_EXPONENT
    return first, second


@triton.jit
def expand_pairs(words, pairs, more, HAS_PTX: tl.constexpr):
    """Expand words to bfloat16 weights: four tensors of the words' shape, with their first, second, … values. `pairs`
    are the scales of the first two, `more` those of the others: bfloat16 pairs in 32 bits each."""
    if HAS_PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            PTX_NVFP4, PTX_NVFP4_TYPES, [words, pairs, more], is_pure=True, pack=2,
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        )  # fmt: skip
    else:
        bits = words.to(tl.int32)
        a = _times_scale((bits >> 6) & 7, (bits >> 15) & 1, _low_of(pairs))
        b = _times_scale((bits >> 3) & 7, (bits >> 12) & 1, _high_of(pairs))
        c = _times_scale(bits & 7, (bits >> 9) & 1, _low_of(more))
        d = _times_scale((((bits >> 13) & 1) << 2) | ((bits >> 10) & 3), (bits >> 14) & 1, _high_of(more))
    return a, b, c, d


@triton.jit
def expand_fp4(words, scales, GROUP: tl.constexpr, HAS_PTX: tl.constexpr):
    """The same with `scales` as loaded, of a shape that broadcasts to the words'. GROUP columns share one; if GROUP is
    16, weights must still be multiplied by their row's factor."""
    if GROUP == GROUPS_OF_16:
        pairs, more = scale_pairs(scales)
        a, b, c, d = expand_pairs(words, pairs, more, HAS_PTX)
    elif HAS_PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            PTX_FP4, PTX_FP4_TYPES, [words, scales], is_pure=True, pack=2,
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        )  # fmt: skip
    else:
        first, second = scales & 0xFFFF, (scales >> 16) & 0xFFFF
        a, b, c, d = expand_pairs(words, first * 0x10001, second * 0x10001, HAS_PTX)
    return a, b, c, d


@triton.jit
def add_chunk(sums, words, scales, rights, GROUP: tl.constexpr, HAS_PTX: tl.constexpr):
    """Add a chunk of weights times its inputs, four tensors [LANES, inputs], to sums [rows, inputs]."""
    values = expand_fp4(words, scales[:, None], GROUP, HAS_PTX)
    for i in tl.static_range(4):
        sums = tl.dot(values[i].to(rights[i].dtype), rights[i], sums)
    return sums


@kernel
def _dequantize_fp4(
    words, scales, factors, out, num_out, num_in, scale_stride,
    ROWS: tl.constexpr, GROUP: tl.constexpr, HAS_PTX: tl.constexpr,
) -> None:  # fmt: skip
    """One chunk of ROWS rows per program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk, lanes = tl.program_id(1), tl.arange(0, LANES)
    is_row, begins = (rows < num_out)[:, None], rows.to(tl.int64)[:, None] * num_in
    found = tl.load(words + begins // 4 + chunk * LANES + lanes[None, :], mask=is_row, other=0)
    own = tl.load(scales + chunk * scale_stride + rows, mask=rows < num_out, other=0)
    values = expand_fp4(found, own[:, None], GROUP, HAS_PTX)
    for i in tl.static_range(4):
        target = out + begins + (chunk * 4 + i) * LANES + lanes[None, :]
        value = values[i]
        if GROUP == GROUPS_OF_16:
            value = value.to(tl.float32) * tl.load(factors + rows, mask=rows < num_out, other=0.0)[:, None]
        tl.store(target, value.to(out.dtype.element_ty), mask=is_row)


def dequantize_fp4(matrix: Fp4Matrix, part: slice, dtype: torch.dtype) -> torch.Tensor:
    """Expand some rows of a matrix to `dtype`, [rows, columns]."""
    words, scales = matrix.words[part], matrix.scales[:, part]
    factors = words if matrix.row_factors is None else matrix.row_factors[part]
    num_out, num_in = len(words), matrix.num_columns
    out = torch.empty(num_out, num_in, dtype=dtype, device=words.device)
    _dequantize_fp4[(cdiv(num_out, 32), matrix.num_chunks)](
        words, scales, factors, out, num_out, num_in, scales.stride(0), 32, matrix.group, has_ptx(), num_warps=4
    )
    return out
