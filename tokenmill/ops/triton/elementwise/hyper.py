"""Hyper-connections: mixtures of several residual streams, in two kernels per mixer or MLP:

    _connect    adds a result to all streams; multiplies the new streams by the coefficient weights and sums their
                squares, for some columns of 16 tokens per program
    _read       computes a token's coefficients, makes its matrix doubly stochastic, and computes some columns
                of the mixture

Both have a fixed order of summation. Coefficients are float32: each product is computed from three bf16 parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.ops.streams import HyperOps, JoinedStreams, ReadStreams, StreamConnection
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

TOKENS = 16  # per program of `_connect`
COLUMNS = 128  # per iteration of `_connect`
MAX_SPLITS = 32  # of a stream's columns
READ_COLUMNS = 1024  # per program of `_read`
FEW_TOKENS = 256  # from this many tokens on, one program computes a token's whole mixture


@kernel_unspecialized("num_tokens")
def _connect(
    streams, result, written, mixed, weight, out, sums, squares, num_tokens, size,
    COUNT: tl.constexpr, ROWS: tl.constexpr, ROWS_PADDED: tl.constexpr, HAS_RESULT: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """sums [T, SPLITS, ROWS], squares [T, SPLITS]"""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    split, is_token = tl.program_id(1), tokens < num_tokens
    rows = tl.arange(0, ROWS_PADDED)
    kind = out.dtype.element_ty
    products = tl.zeros((TOKENS, ROWS_PADDED), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    for start in range(split * EACH, tl.minimum(split * EACH + EACH, size), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = is_token[:, None] & (columns < size)[None, :]
        for stream in tl.static_range(COUNT):
            at = ((tokens * COUNT + stream) * size)[:, None] + columns[None, :]
            if HAS_RESULT:
                added = tl.load(result + (tokens * size)[:, None] + columns[None, :], mask=inside, other=0.0)
                share = tl.load(written + tokens * COUNT + stream, mask=is_token, other=0.0)
                values = added.to(tl.float32) * share[:, None]
                for other in tl.static_range(COUNT):
                    share = tl.load(mixed + (tokens * COUNT + other) * COUNT + stream, mask=is_token, other=0.0)
                    source = streams + ((tokens * COUNT + other) * size)[:, None] + columns[None, :]
                    values += tl.load(source, mask=inside, other=0.0).to(tl.float32) * share[:, None]
                values = values.to(kind).to(tl.float32)
                tl.store(out + at, values.to(kind), mask=inside)
            else:
                values = tl.load(streams + at, mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(values * values, axis=1)
            factors = weight + (rows * (COUNT * size) + stream * size)[:, None] + columns[None, :]
            is_factor = (rows < ROWS)[:, None] & (columns < size)[None, :]
            part = tl.load(factors, mask=is_factor, other=0.0)
            products = tl.dot(values, tl.trans(part), products, input_precision=PRECISION)
    target = sums + ((tokens * SPLITS + split) * ROWS)[:, None] + rows[None, :]
    tl.store(target, products, mask=is_token[:, None] & (rows < ROWS)[None, :])
    tl.store(squares + tokens * SPLITS + split, total, mask=is_token)


@triton.jit
def _added_up(sums, rows, is_row, inverse, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """Sum a token's partial products with some coefficient rows, of any shape [A] or [A, B], and apply the norm."""
    found = tl.zeros(rows.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        found += tl.load(sums + split * ROWS + rows, mask=is_row, other=0.0)
    return found * inverse


@kernel
def _read(
    streams, sums, squares, base, scale, read, written, mixed, size, eps, norm_eps,
    COUNT: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute COLUMNS of a token's mixture; ROUNDS 0: the mixture after the last layer, which has nothing else."""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    splits, numbers = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    square = tl.sum(tl.load(squares + token * SPLITS + splits), axis=0)
    inverse = tl.rsqrt(square / (COUNT * size) + norm_eps)
    own, is_stream = sums + token * (SPLITS * ROWS), numbers < COUNT
    into = _added_up(own, numbers, is_stream, inverse, SPLITS, ROWS)
    shares = tl.sigmoid(into * tl.load(scale) + tl.load(base + numbers, mask=is_stream, other=0.0)) + eps
    first = tl.program_id(1) * COLUMNS
    for start in range(first, tl.minimum(first + COLUMNS, size), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < size
        mixture = tl.zeros((BLOCK,), tl.float32)
        for stream in tl.static_range(COUNT):
            share = tl.sum(tl.where(numbers == stream, shares, 0.0), axis=0)
            source = streams + (token * COUNT + stream) * size + columns
            mixture += tl.load(source, mask=inside, other=0.0).to(tl.float32) * share
        tl.store(read + token * size + columns, mixture.to(read.dtype.element_ty), mask=inside)
    if ROUNDS > 0:
        place = COUNT + numbers
        if first == 0:
            out_of = _added_up(own, place, is_stream, inverse, SPLITS, ROWS)
            logits = out_of * tl.load(scale + 1) + tl.load(base + place, mask=is_stream, other=0.0)
            tl.store(written + token * COUNT + numbers, 2.0 * tl.sigmoid(logits), mask=is_stream)
            places = 2 * COUNT + numbers[:, None] * COUNT + numbers[None, :]
            is_pair = is_stream[:, None] & is_stream[None, :]
            scores = _added_up(own, places, is_pair, inverse, SPLITS, ROWS) * tl.load(scale + 2)
            scores += tl.load(base + places, mask=is_pair, other=0.0)
            scores = tl.where(is_stream[None, :], scores, float("-inf"))
            exps = tl.exp(scores - tl.max(scores, axis=1)[:, None])
            matrix = tl.where(is_pair, exps / tl.sum(exps, axis=1)[:, None] + eps, 0.0)
            matrix /= tl.sum(matrix, axis=0)[None, :] + eps
            for _ in range(ROUNDS - 1):
                matrix /= tl.sum(matrix, axis=1)[:, None] + eps
                matrix /= tl.sum(matrix, axis=0)[None, :] + eps
            target = mixed + token * (COUNT * COUNT) + numbers[:, None] * COUNT + numbers[None, :]
            tl.store(target, matrix, mask=is_pair)


class Products(NamedTuple):
    """The streams, and their partial products with the coefficient weights."""

    streams: torch.Tensor
    sums: torch.Tensor  # float32 [T, splits, rows]
    squares: torch.Tensor  # float32 [T, splits]


def _connected(joined: JoinedStreams, connection: StreamConnection) -> Products:
    streams, addend = joined
    streams, (num_tokens, count, size) = streams.contiguous(), streams.shape
    out = streams if addend is None else torch.empty_like(streams)
    columns = min(COLUMNS, max(16, next_power_of_2(size)))
    splits = min(MAX_SPLITS, next_power_of_2(cdiv(size, columns)))
    num_rows = len(connection.weight)
    sums = torch.empty(num_tokens, splits, num_rows, dtype=torch.float32, device=streams.device)
    squares = torch.empty(num_tokens, splits, dtype=torch.float32, device=streams.device)
    result, written, mixed = (streams, squares, squares) if addend is None else addend
    if num_tokens:
        _connect[(cdiv(num_tokens, TOKENS), splits)](
            streams, result.contiguous(), written.contiguous(), mixed.contiguous(), connection.weight, out, sums,
            squares, num_tokens, size, count, num_rows, max(16, next_power_of_2(num_rows)), addend is not None, TOKENS,
            columns, cdiv(cdiv(size, splits), columns) * columns, splits,
            "tf32x3" if torch.version.hip is None else "ieee",
            num_warps=4, num_stages=1, **launch_options(),
        )  # fmt: skip
    return Products(out, sums, squares)


def _launch_read(
    found: Products,
    connection: StreamConnection,
    num_rounds: int,
    read: torch.Tensor,
    written: torch.Tensor,
    mixed: torch.Tensor,
) -> None:
    (num_tokens, count, size), spec = found.streams.shape, connection.spec
    each = READ_COLUMNS if num_tokens < FEW_TOKENS else cdiv(size, READ_COLUMNS) * READ_COLUMNS
    if num_tokens:
        _read[(num_tokens, cdiv(size, each))](
            *found, connection.base, connection.scale, read, written, mixed, size, spec.eps, spec.norm_eps,
            count, next_power_of_2(count), len(connection.weight), num_rounds, found.sums.shape[1],
            min(READ_COLUMNS, next_power_of_2(size)), each, num_warps=4, **launch_options(),
        )  # fmt: skip


def read_streams(joined: JoinedStreams, connection: StreamConnection) -> ReadStreams:
    found = _connected(joined, connection)
    num_tokens, count, size = found.streams.shape
    written = found.sums.new_empty(num_tokens, count)
    done = ReadStreams(
        found.streams.new_empty(num_tokens, size),
        found.streams,
        written,
        found.sums.new_empty(num_tokens, count, count),
    )
    _launch_read(found, connection, connection.spec.num_rounds, done.read, done.written, done.mixed)
    return done


def end_streams(joined: JoinedStreams, connection: StreamConnection) -> torch.Tensor:
    found = _connected(joined, connection)
    read = found.streams.new_empty(len(found.streams), found.streams.shape[2])
    _launch_read(found, connection, 0, read, found.squares, found.squares)
    return read


HYPER = HyperOps(read_streams, end_streams)
