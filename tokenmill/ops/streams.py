"""What layers over several residual streams (`arch/streams.py`) are computed from, the same for every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tokenmill.arch.streams import HyperConnections


@dataclass(frozen=True)
class AltUpNumbers:
    """A layer's numbers of its own, float32: how streams are predicted and corrected."""

    norm: torch.Tensor  # [H], before the router
    eps: float
    router: torch.Tensor  # [streams, H]
    predict: torch.Tensor  # [streams * streams, streams]
    correct: torch.Tensor  # [streams, streams]
    scale: torch.Tensor | None  # [H]


@dataclass(frozen=True)
class AltUpOps:
    predict: Callable[[torch.Tensor, AltUpNumbers], torch.Tensor]
    """streams [T, streams, H] → all of them as they are predicted behind the layer"""
    correct: Callable[[torch.Tensor, torch.Tensor, AltUpNumbers], tuple[torch.Tensor, torch.Tensor]]
    """(predicted [T, streams, H], the layer's result [T, H]) → the streams, and the first times `scale`"""
    as_long: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """x [T, H], each row scaled to the norm of the other tensor's row"""


@dataclass(frozen=True)
class StreamConnection:
    """Coefficients of a mixture of streams, linear in the normed streams: float32"""

    spec: HyperConnections
    weight: torch.Tensor  # [coefficients, streams * H]
    base: torch.Tensor  # [coefficients]
    scale: torch.Tensor  # one number for each kind of coefficient


class Addend(NamedTuple):
    """The result of a layer's part, which is not yet among the streams: stream i becomes b_i y + Σ_j M_ji h_j"""

    result: torch.Tensor  # y [T, H]
    written: torch.Tensor  # b, float32 [T, streams]
    mixed: torch.Tensor  # M, float32 [T, from, to]


class JoinedStreams(NamedTuple):
    streams: torch.Tensor  # [T, streams, H]
    addend: Addend | None = None


class ReadStreams(NamedTuple):
    """The mixture that a layer's part computes with [T, H], and what its result will be added to"""

    read: torch.Tensor
    streams: torch.Tensor
    written: torch.Tensor
    mixed: torch.Tensor


@dataclass(frozen=True)
class HyperOps:
    read: Callable[[JoinedStreams, StreamConnection], ReadStreams]
    end: Callable[[JoinedStreams, StreamConnection], torch.Tensor]
    """The mixture behind all layers [T, H]"""
