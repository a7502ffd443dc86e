"""The adapter slots of a step's tokens, as the kernels of a GPU read them."""

from __future__ import annotations

from typing import NamedTuple

import torch

RANKS = 16  # ranks are padded to multiples of this
MAX_SINGLE = 64  # tokens that are computed one by one


class TokenSlots(NamedTuple):
    """The slots of a step's tokens, and how they are computed"""

    slots: torch.Tensor  # int32 [T]
    in_tiles: bool


def settle(slots: torch.Tensor) -> None:
    """Let all kernels behind this read `slots` before they wait for the one before them. They do not begin before what
    is launched here, and that, since torch launches it in the ordinary way, not before all that came earlier ended."""
    slots.new_zeros(1)
