"""DoRA: an adapted matrix keeps its direction from W + scale * b a, and has its rows' lengths from a trained vector.

    y = m / |W + scale * b a| * ((W + scale * b a) x)          lengths and m by rows

The factor does not depend on x: it is worked out once, from the base model's weights.
"""

from __future__ import annotations

import torch

ROWS_AT_ONCE = 4096  # of a matrix, whose sum with the adapter is held in memory


def row_factors(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, magnitude: torch.Tensor
) -> torch.Tensor:
    """weight [rows, columns], a, b, magnitude [rows] → m / |W + scale * b a|, float32 [rows]"""
    lengths = [
        torch.linalg.vector_norm(
            weight[first : first + ROWS_AT_ONCE].float()
            + scale * (b[first : first + ROWS_AT_ONCE].float() @ a.float()),
            dim=1,
        )
        for first in range(0, weight.shape[0], ROWS_AT_ONCE)
    ]
    return magnitude.float() / torch.cat(lengths)
