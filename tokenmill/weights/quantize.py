"""Quantisation of floating-point values to blocks, rounding to nearest, for test files, benchmarks and conversion."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME
from tokenmill.errors import UnsupportedModel
from tokenmill.ops.raw import RawTensor

QUANTISERS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
CHUNK_VALUES = 1 << 22


def quantize(tensor: torch.Tensor, quant: str, name: str = "") -> RawTensor:
    """Quantise along the last dimension, whose length must be a multiple of the block length."""
    if quant not in QUANTISERS:
        raise UnsupportedModel(f"quantising to {quant} is not implemented", hint=f"these are: {', '.join(QUANTISERS)}")
    columns, block_size = tensor.shape[-1], GGML_TYPE_BY_NAME[quant].block_size
    if columns % block_size:
        raise UnsupportedModel(f"tensor {name!r}: rows of {columns} cannot be split into blocks of {block_size}")
    rows = tensor.detach().reshape(-1, columns)
    step = max(1, CHUNK_VALUES // columns)
    blocks = [_quantize_rows(rows[start : start + step], quant) for start in range(0, rows.shape[0], step)]
    data = torch.from_numpy(np.concatenate(blocks)).view(*tensor.shape[:-1], -1)
    return RawTensor(name, tuple(tensor.shape), data, quant)


def _quantize_rows(rows: torch.Tensor, quant: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    import gguf  # only here: serving never needs it

    blocks: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = gguf.quants.quantize(
        rows.float().numpy(), gguf.GGMLQuantizationType[quant]
    )
    return blocks
