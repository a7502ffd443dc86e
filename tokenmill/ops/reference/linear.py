"""Matrices as the reference keeps them: one dense tensor in the compute dtype, quantised blocks already expanded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from tokenmill.ops.interface import Dense, LinearWeight
from tokenmill.ops.raw import RawTensor


def pack_linear(parts: Sequence[RawTensor], bias: torch.Tensor | None, dense: Dense) -> LinearWeight:
    if len(parts) == 1:
        return _wrap(dense(parts[0]), bias)
    return _wrap(torch.cat([dense(part) for part in parts]), bias)


def pack_embedding(raw: RawTensor, dense: Dense) -> LinearWeight:
    return _wrap(dense(raw), None)


def _wrap(matrix: torch.Tensor, bias: torch.Tensor | None) -> LinearWeight:
    return LinearWeight(matrix.shape[0], matrix.shape[1], matrix, bias)


def embed(token_ids: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    return functional.embedding(token_ids, weight.packed)


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    return functional.linear(x, weight.packed, weight.bias)
