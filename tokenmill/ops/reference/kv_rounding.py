"""Quantisation of keys and values to one byte per value, with one scale per token and head.

    scale = largest magnitude / largest value of the format          quantised = round(vector / scale)

The error of int8 is at most half a step, 1/254 of the vector's largest magnitude; that of fp8 (e4m3) at most 1/16 of
each value.
"""

from __future__ import annotations

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def rounded(vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D] → quantised values [..., D] in `dtype` and float32 scales [...]; a NaN makes the scale NaN."""
    wide = vectors.float()
    scales = wide.abs().amax(-1) / LARGEST[dtype]
    numbers = wide / scales.clamp(min=1e-30).unsqueeze(-1)
    if dtype == torch.int8:
        numbers = numbers.nan_to_num(0.0).round()
    return numbers.to(dtype), scales
