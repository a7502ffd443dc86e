"""Dequantisation of blocks to floating point, a few rows at a time so that memory stays bounded.

Common formats are dequantized by `ops/blocks.py`, the others by the `gguf` package, which is the reference for all.
"""

from __future__ import annotations

import torch

from tokenmill.arch.block_formats import BLOCK_TYPES
from tokenmill.errors import UnsupportedModel
from tokenmill.ops.blocks import expanded, is_known
from tokenmill.ops.raw import RawTensor

CHUNK_VALUES = 1 << 20  # values dequantized at a time on a CPU: small enough for its cache
GPU_CHUNK_VALUES = 1 << 22  # the same on a GPU, where a chunk takes a dozen kernel launches


def dequantize(raw: RawTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of `raw` in `dtype`, of the same shape and on the same device."""
    if raw.quant is None:
        return raw.data.to(dtype)
    rows = raw.data.reshape(-1, raw.data.shape[-1])  # uint8 [rows, bytes per row]
    values = torch.empty(rows.shape[0], raw.shape[-1], dtype=dtype, device=rows.device)
    step = max(1, (CHUNK_VALUES if rows.device.type == "cpu" else GPU_CHUNK_VALUES) // raw.shape[-1])
    for start in range(0, rows.shape[0], step):
        values[start : start + step] = _dequantize_rows(rows[start : start + step], raw)
    return values.view(raw.shape)


def _dequantize_rows(rows: torch.Tensor, raw: RawTensor) -> torch.Tensor:
    """Dequantize uint8 [rows, bytes] to float32 [rows, values]."""
    assert raw.quant is not None
    if not is_known(raw.quant):
        return _dequantize_with_gguf(rows, raw)
    blocks = rows.reshape(-1, BLOCK_TYPES[raw.quant].block_bytes)
    return expanded(raw.quant, blocks).view(rows.shape[0], raw.shape[-1])


def _dequantize_with_gguf(rows: torch.Tensor, raw: RawTensor) -> torch.Tensor:
    import gguf  # only here: most files never need it

    try:
        values = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[str(raw.quant)])
    except (KeyError, NotImplementedError):
        raise UnsupportedModel(f"tensor {raw.name!r}: the quantisation {raw.quant} is not implemented") from None
    return torch.from_numpy(values)
