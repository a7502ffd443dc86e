"""AltUp: prediction and correction of several residual streams; one program per token, with a fixed order of
summation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.reference.streams import MIN_SQUARE
from tokenmill.ops.streams import AltUpNumbers, AltUpOps
from tokenmill.ops.triton.elementwise.activation import tanh
from tokenmill.ops.triton.launch.kernel import kernel, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous


@triton.jit
def _coefficients(x, norm, router, columns, inside, size, eps, STREAMS: tl.constexpr, PADDED: tl.constexpr):
    """Return the coefficients, float32 [PADDED], zero-padded after the last stream."""
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps) * tl.load(norm + columns, mask=inside, other=0.0)
    normed = normed / size
    number = tl.arange(0, PADDED)
    found = tl.zeros((PADDED,), tl.float32)
    for stream in tl.static_range(STREAMS):
        product = tl.sum(normed * tl.load(router + stream * size + columns, mask=inside, other=0.0), axis=0)
        found = tl.where(number == stream, product, found)
    return tanh(found)


@triton.jit
def _linear(coefficients, matrix, row, STREAMS: tl.constexpr, PADDED: tl.constexpr):
    """Multiply a row of a matrix [.., STREAMS] by the coefficients."""
    number = tl.arange(0, PADDED)
    return tl.sum(coefficients * tl.load(matrix + row * STREAMS + number, mask=number < STREAMS, other=0.0), axis=0)


@kernel
def _predict_streams(
    streams, norm, router, matrix, out, size, eps, STREAMS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    at = tl.program_id(0).to(tl.int64) * STREAMS * size
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    first = tl.load(streams + at + columns, mask=inside, other=0.0).to(tl.float32)
    coefficients = _coefficients(first, norm, router, columns, inside, size, eps, STREAMS, PADDED)
    for stream in tl.static_range(STREAMS):
        mixture = tl.zeros((BLOCK,), tl.float32)
        for other in tl.static_range(STREAMS):
            share = _linear(coefficients, matrix, stream * STREAMS + other, STREAMS, PADDED)
            mixture += share * tl.load(streams + at + other * size + columns, mask=inside, other=0.0).to(tl.float32)
        mixture += tl.load(streams + at + stream * size + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at + stream * size + columns, mixture.to(out.dtype.element_ty), mask=inside)


@kernel
def _correct_streams(
    predicted, result, norm, router, matrix, scale, out, first_out, size, eps, HAS_SCALE: tl.constexpr,
    STREAMS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    at = token * STREAMS * size
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    found = tl.load(result + token * size + columns, mask=inside, other=0.0).to(tl.float32)
    coefficients = _coefficients(found, norm, router, columns, inside, size, eps, STREAMS, PADDED)
    change = found - tl.load(predicted + at + columns, mask=inside, other=0.0).to(tl.float32)
    for stream in tl.static_range(STREAMS):
        share = _linear(coefficients, matrix, stream, STREAMS, PADDED) + 1.0
        value = tl.load(predicted + at + stream * size + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = (value + change * share).to(out.dtype.element_ty)
        tl.store(out + at + stream * size + columns, rounded, mask=inside)
        if stream == 0:
            kept = rounded
            if HAS_SCALE:
                factors = tl.load(scale + columns, mask=inside, other=0.0).to(out.dtype.element_ty).to(tl.float32)
                kept = (rounded.to(tl.float32) * factors).to(out.dtype.element_ty)
            tl.store(first_out + token * size + columns, kept, mask=inside)


@kernel
def _as_long(x, model, out, size, min_square, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr) -> None:
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    columns = tl.arange(0, BLOCK)
    at, inside = tl.program_id(0).to(tl.int64) * size + columns, columns < size
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(model + at, mask=inside, other=0.0).to(tl.float32)
    target_rms = tl.sqrt(tl.sum(other * other, axis=0) / size)
    rms = tl.sqrt(tl.maximum(tl.sum(value * value, axis=0) / size, min_square))
    tl.store(out + at, (value * (target_rms / rms)).to(out.dtype.element_ty), mask=inside)


def predict(streams: torch.Tensor, numbers: AltUpNumbers) -> torch.Tensor:
    streams = streams.contiguous()
    out, (num_tokens, count, size) = torch.empty_like(streams), streams.shape
    if num_tokens:
        block = next_power_of_2(size)
        _predict_streams[(num_tokens,)](
            streams, numbers.norm, numbers.router, numbers.predict, out, size, numbers.eps, count,
            next_power_of_2(count), block, num_warps=_warps(block), **launch_options(),
        )  # fmt: skip
    return out


def correct(predicted: torch.Tensor, result: torch.Tensor, numbers: AltUpNumbers) -> tuple[torch.Tensor, torch.Tensor]:
    predicted, result = predicted.contiguous(), result.contiguous()
    out, first, (num_tokens, count, size) = torch.empty_like(predicted), torch.empty_like(result), predicted.shape
    if num_tokens:
        block, scale = next_power_of_2(size), numbers.norm if numbers.scale is None else numbers.scale
        _correct_streams[(num_tokens,)](
            predicted, result, numbers.norm, numbers.router, numbers.correct, scale, out, first, size, numbers.eps,
            numbers.scale is not None, count, next_power_of_2(count), block, num_warps=_warps(block),
            **launch_options(),
        )  # fmt: skip
    return out, first


def as_long(x: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    x, model = x.contiguous(), model.contiguous()
    out, (num_tokens, size) = torch.empty_like(x), x.shape
    if num_tokens:
        block = next_power_of_2(size)
        _as_long[(num_tokens,)](x, model, out, size, MIN_SQUARE, block, num_warps=_warps(block), **launch_options())
    return out


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8


ALTUP = AltUpOps(predict, correct, as_long)
