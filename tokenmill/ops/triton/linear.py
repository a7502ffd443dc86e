"""Matrices on a GPU: cuBLAS, and for a few rows kernels of our own that read the matrix at the memory's speed."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenmill.ops.interface import LinearWeight


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    return functional.linear(x, weight.packed, weight.bias)
