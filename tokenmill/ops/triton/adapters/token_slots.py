"""The adapter slots of a step's tokens, in the form that GPU kernels read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

RANKS = 16  # ranks are padded to multiples of this
MAX_SINGLE = 64  # up to this many tokens are computed one per program


class Present(NamedTuple):
    """The adapters that some of a step's tokens use, numbered by place, in the order of their first tokens."""

    slots: torch.Tensor  # int32 [1 + T]: the number of adapters, then their slots, counted from 0
    places: torch.Tensor  # int32 [T]: the place of each token's adapter; -1: none
    ready: torch.Tensor  # int32: for each product of the step, how many of its programs have stored a part of h
    numbers: Iterator[int]  # of the counters that no product uses yet


class TokenSlots(NamedTuple):
    """The adapter slots of a step's tokens, and whether these are computed in tiles."""

    slots: torch.Tensor  # int32 [T]
    in_tiles: bool
    present: Present | None = None
