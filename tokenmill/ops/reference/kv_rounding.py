"""Keys and values in one byte a number: each head's vector of a token has a scale of its own.

    scale = largest magnitude / largest number of the format          number = vector / scale, rounded

int8 errs by at most half a step, 1/254 of the vector's largest magnitude; fp8 (e4m3) by at most 1/16 of each number.
"""

from __future__ import annotations

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def rounded(vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D] → numbers [..., D] in `dtype` and float32 scales [...]; NaN ends up in the scale."""
    wide = vectors.float()
    scales = wide.abs().amax(-1) / LARGEST[dtype]
    numbers = wide / scales.clamp(min=1e-30).unsqueeze(-1)
    if dtype == torch.int8:
        numbers = numbers.nan_to_num(0.0).round()
    return numbers.to(dtype), scales
