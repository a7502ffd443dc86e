"""Matrices of MXFP4 as a file has them: numbers of 4 bits and, for each 32 columns of a row, a power of two.

A number is a sign, two bits of exponent and one of mantissa (0, 0.5, 1, 1.5, 2, 3, 4, 6). A row is cut into chunks of
64 columns. Word w of a chunk, 16 bits, has one column of each quarter: w, w + 16, w + 32 and w + 48, so that the i-th
numbers of all words are neighbours, as the columns they multiply.

With its sign in bfloat16's place, its exponent in the lowest bits of bfloat16's and its mantissa in the highest one, a
number is 2 ** 126 too small, whichever it is; the scale makes up for that. Every weight is a number of bfloat16 then,
so nothing is rounded. The first three numbers of a word (a, b, c) need one shift for that, or none; the fourth (d) has
the bits that are left:

    bit of a word   15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
                    a-  d-  d   b-  d   d   c-  a   a   a   b   b   b   c   c   c       - sign

The two scales of a chunk are one number of 32 bits; those of neighbouring rows are neighbours:

    scales [chunks, rows]:   [ second | first ], 2 ** 126 * scale in bfloat16 each
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from tokenmill.arch.packed_formats import MX_CHUNK, MX_GROUP
from tokenmill.ops.triton.launch.kernel import cdiv, kernel
from tokenmill.ops.triton.quant.packed_int import has_ptx

LANES = tl.constexpr(16)  # words of a chunk
MAX_EXPONENT = 128  # of a file's scale: times 2 ** 126 it is a number of bfloat16
RAISED = 126  # what is added to a file's exponent to make it that of such a number
BLOCK_BYTES = 17  # of a file's block: an exponent, then 16 bytes whose low nibbles are the first half of the group
ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class Fp4Matrix:
    words: torch.Tensor  # int16 [rows, columns / 4]
    scales: torch.Tensor  # int32 [columns / 64, rows]

    @property
    def num_columns(self) -> int:
        return 4 * self.words.shape[1]

    @property
    def num_chunks(self) -> int:
        return len(self.scales)


def fp4_from_blocks(blocks: torch.Tensor) -> Fp4Matrix:
    """uint8 [rows, bytes] of a file's blocks"""
    num_rows, num_columns = blocks.shape[0], blocks.shape[1] // BLOCK_BYTES * MX_GROUP
    words = torch.empty(num_rows, num_columns // 4, dtype=torch.int16, device=blocks.device)
    scales = torch.empty(num_columns // MX_CHUNK, num_rows, dtype=torch.int32, device=blocks.device)
    for first in range(0, num_rows, ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        groups = blocks[part].reshape(-1, num_columns // MX_GROUP, BLOCK_BYTES)
        raised = (groups[..., 0].int() + RAISED).view(-1, num_columns // MX_CHUNK, 2) << 7
        scales[:, part] = (raised[..., 0] | (raised[..., 1] << 16)).t()
        packed = groups[..., 1:]
        codes = torch.cat((packed & 15, packed >> 4), dim=2).to(torch.int16).view(len(groups), -1, 4, MX_CHUNK // 4)
        (a, b, c, d), (a_sign, b_sign, c_sign, d_sign) = (codes & 7).unbind(2), (codes >> 3).unbind(2)
        signs = (a_sign << 15) | (b_sign << 12) | (c_sign << 9) | (d_sign << 14)
        words[part] = (signs | (a << 6) | (b << 3) | c | ((d >> 2) << 13) | ((d & 3) << 10)).flatten(1)
    return Fp4Matrix(words, scales)


def has_fitting_scales(blocks: torch.Tensor) -> bool:
    """Return whether the kernels can multiply by all scales of a file's blocks, uint8 [..., bytes]."""
    return bool((blocks.view(*blocks.shape[:-1], -1, BLOCK_BYTES)[..., 0] <= MAX_EXPONENT).all())


def interleaved_fp4(first: Fp4Matrix, second: Fp4Matrix, num_parts: int) -> Fp4Matrix:
    """Both in as many parts of rows, one of the first before one of the second: gates and ups of experts"""
    words = torch.cat([one.words.unflatten(0, (num_parts, -1)) for one in (first, second)], dim=1).flatten(0, 1)
    scales = torch.cat([one.scales.unflatten(1, (num_parts, -1)) for one in (first, second)], dim=2).flatten(1)
    return replace(first, words=words, scales=scales)


def ptx_fp4() -> str:
    """PTX: the four numbers of two neighbouring words ($4), times their scales ($5), in pairs"""
    return """{
.reg .b32 t, u, v, first, second, zero;
mov.b32 zero, 0x80008000;
prmt.b32 first, $5, $5, 0x1010;
prmt.b32 second, $5, $5, 0x3232;
and.b32 t, $4, 0x81C081C0;
fma.rn.bf16x2 $0, t, first, zero;
shl.b32 t, $4, 3;
and.b32 t, t, 0x81C081C0;
fma.rn.bf16x2 $1, t, first, zero;
shl.b32 t, $4, 6;
and.b32 t, t, 0x81C081C0;
fma.rn.bf16x2 $2, t, second, zero;
shr.u32 t, $4, 5;
and.b32 t, t, 0x01000100;
shr.u32 u, $4, 4;
lop3.b32 t, u, 0x00C000C0, t, 0xEA;
shl.b32 v, $4, 1;
lop3.b32 t, v, 0x80008000, t, 0xEA;
fma.rn.bf16x2 $3, t, second, zero;
}"""


PTX_FP4 = tl.constexpr(ptx_fp4())
PTX_FP4_TYPES = tl.constexpr("=r,=r,=r,=r,r,r,r")  # the scale of either word, which is the same


@triton.jit
def _times_scale(code, sign, scale):
    """A number of three bits and its sign, in float32's places, times its scale"""
    bits = (code << 22) | (sign << 31)
    return (bits.to(tl.float32, bitcast=True) * scale.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def expand_fp4(words, scales, HAS_PTX: tl.constexpr):
    """Weights in bfloat16: four tensors of the words' shape, with their first, second ... numbers. `scales` as they
    were loaded, of a shape that broadcasts to the words'"""
    if HAS_PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            PTX_FP4, PTX_FP4_TYPES, [words, scales], is_pure=True, pack=2,
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        )  # fmt: skip
    else:
        first = scales.to(tl.int16).to(tl.bfloat16, bitcast=True)
        second = (scales >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        bits = words.to(tl.int32)
        a = _times_scale((bits >> 6) & 7, (bits >> 15) & 1, first)
        b = _times_scale((bits >> 3) & 7, (bits >> 12) & 1, first)
        c = _times_scale(bits & 7, (bits >> 9) & 1, second)
        d = _times_scale((((bits >> 13) & 1) << 2) | ((bits >> 10) & 3), (bits >> 14) & 1, second)
    return a, b, c, d


@kernel
def _dequantize_fp4(
    words, scales, out, num_out, num_in, scale_stride, ROWS: tl.constexpr, HAS_PTX: tl.constexpr
) -> None:
    """A chunk of ROWS rows a program"""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk, lanes = tl.program_id(1), tl.arange(0, LANES)
    is_row, begins = (rows < num_out)[:, None], rows.to(tl.int64)[:, None] * num_in
    found = tl.load(words + begins // 4 + chunk * LANES + lanes[None, :], mask=is_row, other=0)
    own = tl.load(scales + chunk * scale_stride + rows, mask=rows < num_out, other=0)
    values = expand_fp4(found, own[:, None], HAS_PTX)
    for i in tl.static_range(4):
        target = out + begins + (chunk * 4 + i) * LANES + lanes[None, :]
        tl.store(target, values[i].to(out.dtype.element_ty), mask=is_row)


def dequantize_fp4(matrix: Fp4Matrix, part: slice, dtype: torch.dtype) -> torch.Tensor:
    """Some rows of a matrix, [rows, columns] of `dtype`"""
    words, scales = matrix.words[part], matrix.scales[:, part]
    num_out, num_in = len(words), matrix.num_columns
    out = torch.empty(num_out, num_in, dtype=dtype, device=words.device)
    _dequantize_fp4[(cdiv(num_out, 32), matrix.num_chunks)](
        words, scales, out, num_out, num_in, scales.stride(0), 32, has_ptx(), num_warps=4
    )
    return out
