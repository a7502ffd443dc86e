"""From the mass that the cuts left to one token: inverse of the cumulative distribution, in vocabulary order.

weights   |  t0  |t1|      t2      | t3 |      u in [0, 1) falls into exactly one token's interval
          0             ^ u * total     total
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmill.types import TokenLogprobs


class Sample(NamedTuple):
    """`token_id` is meaningless where `error` is set."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    mirostat_mu: float | None = None  # what the row's next draw goes by if this token is taken
    error: str | None = None


def draw(mass: Tensor, uniforms: list[float]) -> Tensor:
    """One token id per row of mass int64 [S, V]: int64 [S]. `uniforms` holds one number in [0, 1) per row."""
    cumulative = mass.cumsum(dim=-1)
    total = cumulative[:, -1:]
    u = torch.tensor(uniforms, dtype=torch.float64, device=mass.device).unsqueeze(1)
    target = torch.minimum((u * total.double()).long(), total - 1)
    # first token whose interval ends beyond the target; a token of weight 0 has an empty interval
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)
