"""Several residual streams (`arch/streams.py`) in plain torch: AltUp and hyper-connections."""

from __future__ import annotations

import torch

from tokenmill.ops.reference.elementwise import rms_norm
from tokenmill.ops.streams import AltUpNumbers, AltUpOps, HyperOps, JoinedStreams, ReadStreams, StreamConnection

MIN_SQUARE = 1e-5  # of a stream that is rescaled


def predict(streams: torch.Tensor, numbers: AltUpNumbers) -> torch.Tensor:
    count = streams.shape[1]
    mixture = (_coefficients(streams[:, 0], numbers) @ numbers.predict.t()).view(-1, count, count)
    return (mixture @ streams.float() + streams).to(streams.dtype)


def correct(predicted: torch.Tensor, result: torch.Tensor, numbers: AltUpNumbers) -> tuple[torch.Tensor, torch.Tensor]:
    weights = _coefficients(result, numbers) @ numbers.correct.t() + 1.0  # [T, streams]
    corrected = (predicted + (result - predicted[:, 0]).unsqueeze(1) * weights.unsqueeze(2)).to(result.dtype)
    first = corrected[:, 0]
    return corrected, first if numbers.scale is None else first * numbers.scale.to(first.dtype)


def _coefficients(x: torch.Tensor, numbers: AltUpNumbers) -> torch.Tensor:
    """[T, H] → float32 [T, streams]"""
    normed = rms_norm(x.float(), numbers.norm, numbers.eps)
    return torch.tanh(normed / x.shape[1] @ numbers.router.t())


def as_long(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    target_rms = other.float().square().mean(-1, keepdim=True).sqrt()
    rms = x.float().square().mean(-1, keepdim=True).clamp(min=MIN_SQUARE).sqrt()
    return (x * (target_rms / rms)).to(x.dtype)


ALTUP = AltUpOps(predict, correct, as_long)


# ── hyper-connections ──────────────────────────────────────────────────────────────────────────────────


def read_streams(joined: JoinedStreams, connection: StreamConnection) -> ReadStreams:
    spec, streams = connection.spec, _connected(joined)
    count, eps, scale = spec.num_streams, spec.eps, connection.scale
    into, out_of, mixed = torch.split(_products(streams, connection), [count, count, count**2], dim=1)
    base_in, base_out, base_mixed = torch.split(connection.base, [count, count, count**2])
    shares = torch.sigmoid(into * scale[0] + base_in) + eps
    written = 2 * torch.sigmoid(out_of * scale[1] + base_out)
    scores = (mixed * scale[2] + base_mixed).view(-1, count, count)
    matrix = torch.softmax(scores, dim=-1) + eps
    return ReadStreams(_mixture(streams, shares), streams, written, _doubly_stochastic(matrix, spec.num_rounds, eps))


def end_streams(joined: JoinedStreams, connection: StreamConnection) -> torch.Tensor:
    streams = _connected(joined)
    shares = torch.sigmoid(_products(streams, connection) * connection.scale[0] + connection.base)
    return _mixture(streams, shares + connection.spec.eps)


def _connected(joined: JoinedStreams) -> torch.Tensor:
    streams, addend = joined
    if addend is None:
        return streams
    result, written, mixed = addend
    total = written.unsqueeze(2) * result.unsqueeze(1) + mixed.transpose(1, 2) @ streams.float()
    return total.to(streams.dtype)


def _products(streams: torch.Tensor, connection: StreamConnection) -> torch.Tensor:
    """→ [T, coefficients]"""
    flat = streams.flatten(1).float()
    inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + connection.spec.norm_eps)
    return flat * inverse @ connection.weight.t()


def _mixture(streams: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return (shares.unsqueeze(2) * streams).sum(1).to(streams.dtype)


def _doubly_stochastic(matrix: torch.Tensor, num_rounds: int, eps: float) -> torch.Tensor:
    matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
    for _ in range(num_rounds - 1):
        matrix = matrix / (matrix.sum(2, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
    return matrix


HYPER = HyperOps(read_streams, end_streams)
