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
