"""What the runner asks of a model. A decoder made of ops, a native whole-step one and a scripted one all fit."""

from __future__ import annotations

from typing import Protocol

import torch

from tokenmill.kv.storage import KVStorage
from tokenmill.ops.batch import ForwardBatch
from tokenmill.ops.raw import RawTensor


class Model(Protocol):
    @property
    def vocab_size(self) -> int: ...

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        """Feeds the batch's tokens, writes their keys and values; normed hidden states [L, H] of `logit_rows`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, H] → float32 [L, vocab]"""
        ...


class WeightSource(Protocol):
    """Tensors of a checkpoint under our own names (see TensorSpec)."""

    def get(self, name: str) -> RawTensor: ...
