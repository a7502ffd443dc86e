"""Matrices of the reference backend: one dense tensor in the compute dtype; quantised blocks are expanded at load.

A row's product must not depend on the number of rows in the step. BLAS libraries use another order of summation for few
rows than for many; from MIN_ROWS rows on the order is constant, so smaller inputs are padded with zeros. That makes
single rows slower, but the reference is built to be correct, not fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from tokenmill.ops.batch import Mode
from tokenmill.ops.interface import Dense, LinearWeight
from tokenmill.ops.raw import RawTensor

MIN_ROWS = 16


def pack_linear(parts: Sequence[RawTensor], bias: torch.Tensor | None, dense: Dense) -> LinearWeight:
    if len(parts) == 1:
        return _wrap(dense(parts[0]), bias)
    return _wrap(torch.cat([dense(part) for part in parts]), bias)


def pack_embedding(raw: RawTensor, dense: Dense) -> LinearWeight:
    return _wrap(dense(raw), None)


def _wrap(matrix: torch.Tensor, bias: torch.Tensor | None) -> LinearWeight:
    return LinearWeight(matrix.shape[0], matrix.shape[1], matrix, bias)


def gather_rows(tables: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return tables[:, numbers]


def embed(token_ids: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    return functional.embedding(token_ids, weight.packed)


def linear(x: torch.Tensor, weight: LinearWeight, mode: Mode = "eager") -> torch.Tensor:
    return multiply(x, weight.packed, weight.bias)


def multiply(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [T, columns] @ matrix [rows, columns].T + bias; a row's result does not depend on T."""
    num_rows = x.shape[0]
    if num_rows < MIN_ROWS:
        x = functional.pad(x, (0, 0, 0, MIN_ROWS - num_rows))
    return functional.linear(x, matrix, bias)[:num_rows]


def multiply_groups(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tgc,grc->tgr", x, matrices).flatten(1)
