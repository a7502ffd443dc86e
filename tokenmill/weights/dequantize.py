"""Quantised blocks back to plain values, in pieces of a few rows so that memory stays bounded.

The arithmetic is the `gguf` package's, whose results are the format's reference.
"""

from __future__ import annotations

import torch

from tokenmill.errors import UnsupportedModel
from tokenmill.ops.raw import RawTensor

CHUNK_VALUES = 1 << 22  # values expanded at once


def dequantize(raw: RawTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of `raw` in `dtype`, shaped like it."""
    if raw.quant is None:
        return raw.data.to(dtype)
    rows = raw.data.reshape(-1, raw.data.shape[-1])  # uint8 [rows, bytes per row]
    values = torch.empty(rows.shape[0], raw.shape[-1], dtype=dtype)
    step = max(1, CHUNK_VALUES // raw.shape[-1])
    for start in range(0, rows.shape[0], step):
        values[start : start + step] = _expanded(rows[start : start + step], raw.quant)
    return values.view(raw.shape)


def _expanded(rows: torch.Tensor, quant: str) -> torch.Tensor:
    """uint8 [rows, bytes] → float32 [rows, values]"""
    import gguf  # takes a while to import, and dense checkpoints never need it

    try:
        values = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[quant])
    except (KeyError, NotImplementedError):
        raise UnsupportedModel(f"the quantisation {quant} cannot be expanded") from None
    return torch.from_numpy(values)
