"""Weights and ops of layers over several residual streams (`arch/streams.py`), in the form that every backend uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tokenmill.arch.streams import HyperConnections


@dataclass(frozen=True)
class AltUpNumbers:
    """A layer's AltUp weights, float32, by which its streams are predicted and corrected."""

    norm: torch.Tensor  # [H], before the router
    eps: float
    router: torch.Tensor  # [streams, H]
    predict: torch.Tensor  # [streams * streams, streams]
    correct: torch.Tensor  # [streams, streams]
    scale: torch.Tensor | None  # [H]


@dataclass(frozen=True)
class AltUpOps:
    predict: Callable[[torch.Tensor, AltUpNumbers], torch.Tensor]
    """streams [T, streams, H] → prediction of all streams after the layer"""
    correct: Callable[[torch.Tensor, torch.Tensor, AltUpNumbers], tuple[torch.Tensor, torch.Tensor]]
    """(predicted [T, streams, H], the layer's result [T, H]) → corrected streams, and the first one times `scale`"""
    as_long: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(x [T, H], other [T, H]) → x with each row scaled to the norm of the other's row"""


@dataclass(frozen=True)
class StreamConnection:
    """The weights from which the coefficients of a mixture of streams are computed, float32."""

    spec: HyperConnections
    weight: torch.Tensor  # [coefficients, streams * H]
    base: torch.Tensor  # [coefficients]
    scale: torch.Tensor  # one value per kind of coefficient


class Addend(NamedTuple):
    """A mixer's or MLP's result that is not yet added to the streams: stream i becomes b_i y + Σ_j M_ji h_j."""

    result: torch.Tensor  # y [T, H]
    written: torch.Tensor  # b, float32 [T, streams]
    mixed: torch.Tensor  # M, float32 [T, from, to]


class JoinedStreams(NamedTuple):
    streams: torch.Tensor  # [T, streams, H]
    addend: Addend | None = None


class ReadStreams(NamedTuple):
    """The input of a mixer or MLP, `read` [T, H], and how its result will be added to the streams (see `Addend`)."""

    read: torch.Tensor
    streams: torch.Tensor
    written: torch.Tensor
    mixed: torch.Tensor


@dataclass(frozen=True)
class HyperOps:
    read: Callable[[JoinedStreams, StreamConnection], ReadStreams]
    end: Callable[[JoinedStreams, StreamConnection], torch.Tensor]
    """→ the mixture after the last layer [T, H]"""
