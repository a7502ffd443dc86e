"""The adapter slots of a step's tokens, in the form that GPU kernels read."""

from __future__ import annotations

from typing import NamedTuple

import torch

RANKS = 16  # ranks are padded to multiples of this
MAX_SINGLE = 64  # up to this many tokens are computed one per program


class TokenSlots(NamedTuple):
    """The adapter slots of a step's tokens, and whether these are computed in tiles."""

    slots: torch.Tensor  # int32 [T]
    in_tiles: bool
