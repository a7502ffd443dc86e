"""Products of some dozens of rows with matrices of 8-bit words: enough rows to keep the matrix units busy, too few to
expand the matrix into memory first.

As in `strips` a program owns a strip of the matrix and a share of its columns. Here the rows are the left factor; the
strip is expanded, scaled, and put together to one tile of shared memory a turn, from where the matrix units read it
while the next is made:

    inputs [ROWS, 4 * WORDS] · tile [4 * WORDS, STRIP] → sums [ROWS, STRIP]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.kernel import kernel_for_any
from tokenmill.ops.triton.overlap import let_next_begin, wait_for_previous
from tokenmill.ops.triton.strips import Cut, join_splits, launch, scales_from, share_of_strip, store_strip
from tokenmill.ops.triton.words import expand_8_bits, has_ptx, minimum_of, scale_of

MIN_ROWS, MAX_ROWS = 33, 128
STRIP, PROGRAMS = 128, 132


@triton.jit
def _weights(values, found, DTYPE: tl.constexpr):
    """values [STRIP, WORDS] of one group each, with what was found of its scales"""
    weights = values.to(tl.float32) * scale_of(found)[:, None]
    if found.dtype == tl.int32:
        weights += minimum_of(found)[:, None]
    return weights.to(DTYPE)


@kernel_for_any("num_rows")
def _wide_strips(
    x, weight, scales, bias, out, parts, arrived, num_rows, num_out, num_in,
    ROWS: tl.constexpr, STRIP: tl.constexpr, WORDS: tl.constexpr, SPLITS: tl.constexpr, THREADS: tl.constexpr,
    FETCHED: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, HAS_PTX: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Takes what all kernels of strips do, but nothing is fetched early."""
    let_next_begin(OVERLAPS)
    strip, lines, low, high = share_of_strip(num_in // 4, STRIP, WORDS, SPLITS)
    columns, rows = tl.arange(0, WORDS), tl.arange(0, ROWS)
    matrix = weight + (lines % num_out).to(tl.int64)[:, None] * (num_in // 4) + columns[None, :]
    inputs = x + (rows % num_rows)[:, None] * num_in + tl.arange(0, 4 * WORDS)[None, :]
    groups: tl.constexpr = 4 * WORDS // GROUP
    places = scales + lines % num_out
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((ROWS, STRIP), tl.float32)
    for start in range(low, high, WORDS):
        found = scales_from(places + start // WORDS * groups * num_out, num_out, groups)
        a, b, c, d = expand_8_bits(tl.load(matrix + start), x.dtype.element_ty, HAS_PTX)
        a, b = _weights(a, found[0], x.dtype.element_ty), _weights(b, found[WORDS // GROUP], x.dtype.element_ty)
        c = _weights(c, found[2 * WORDS // GROUP], x.dtype.element_ty)
        d = _weights(d, found[3 * WORDS // GROUP], x.dtype.element_ty)
        # [STRIP, WORDS, 2, 2] of a c / b d: all of a's columns first, then b's, c's and d's
        tile = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 3, 2, 1))
        left = tl.load(inputs + start * 4)
        sums = tl.dot(left, tl.trans(tl.reshape(tile, (STRIP, 4 * WORDS))), sums)
    total = tl.trans(sums)
    is_last = True
    if SPLITS > 1:
        total, is_last = join_splits(total, parts, arrived, strip, STRIP, ROWS, SPLITS)
    if is_last:
        store_strip(total, bias, out, lines, rows, num_rows, num_out, HAS_BIAS)


def cut_for(num_out: int, num_words: int, span: int) -> Cut:
    """As measured on an H200."""
    splits = 1
    while num_out // STRIP * splits < PROGRAMS and splits < num_words // span // 4:
        splits *= 2
    return Cut(STRIP, span, splits, 2)


def wide_strip_linear(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, span: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """words int32 [num_out, num_in / 4], scales [groups, num_out] of groups of at least a span's words"""
    group = x.shape[1] // len(scales)
    return launch(_wide_strips, x, words, bias, scales, cut_for(*words.shape, span), 16, group, has_ptx())
