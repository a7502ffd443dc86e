"""From a finished row of logits to one token: inverse of the cumulative distribution, in vocabulary order.

weights   |  t0  |t1|      t2      | t3 |      u in [0, 1) falls into exactly one token's interval
          0             ^ u * total     total
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.sampling.fixed_point import weights


def draw(logits: Tensor, uniforms: list[float]) -> Tensor:
    """One token id per row, int64 [S]. `uniforms` holds one number in [0, 1) per row."""
    cumulative = weights(logits).cumsum(dim=-1)
    total = cumulative[:, -1:]
    u = torch.tensor(uniforms, dtype=torch.float64, device=logits.device).unsqueeze(1)
    target = torch.minimum((u * total.double()).long(), total - 1)
    # first token whose interval ends beyond the target; a token of weight 0 has an empty interval
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)
