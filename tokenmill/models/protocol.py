"""The interface between runner and model: of the op-based decoder, the native CPU decoder and scripted test models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from tokenmill.kv.storage import KVStorage
from tokenmill.ops.batch import DrawParams, ForwardBatch, Mode, StepRows
from tokenmill.ops.low_rank import LowRank
from tokenmill.ops.raw import RawTensor


class BestLogits(Protocol):
    def __call__(
        self, hidden: torch.Tensor, mode: Mode = "eager", adapters: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[L, H] → the token with the highest logit, int64 [L] (of equal logits the lowest id), and that logit, float32
        [L] (NaN if any logit of the row is NaN). `adapters`: see `Model.logits`."""
        ...


class DirectModel(Protocol):
    """A whole decode step in one call, from token ids to sampled tokens or logits, without tensors in between."""

    def greedy_next(self, rows: StepRows, storage: KVStorage) -> list[int]:
        """Return the greedy next token after each output position; -1 where the highest logit is not finite."""
        ...

    def draw_next(self, rows: StepRows, params: DrawParams, storage: KVStorage) -> list[int]:
        """Return a sampled next token after each output position; -1 where the highest logit is not finite."""
        ...

    def logits_next(self, rows: StepRows, storage: KVStorage) -> torch.Tensor:
        """Return the logits at each output position, float32 [L, vocab], in a buffer that the next call overwrites."""
        ...


class Model(Protocol):
    @property
    def vocab_size(self) -> int: ...

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        """Compute the batch's tokens, write their KV cache, and return normed hidden states [L, H] of `logit_rows`."""
        ...

    def logits(self, hidden: torch.Tensor, mode: Mode = "eager", adapters: torch.Tensor | None = None) -> torch.Tensor:
        """[L, H] → float32 [L, vocab]; `adapters` int32 [L]: the adapter slot of each row, 0 for none"""
        ...

    @property
    def best_logits(self) -> BestLogits | None:
        """Return a function that computes the argmax of the logits faster than `logits`; None if there is none."""
        ...

    @property
    def direct(self) -> DirectModel | None:
        """Return the interface that takes rows as plain lists; None if the model takes tensors only."""
        ...

    @property
    def adapter_slots(self) -> LoadableAdapters | None:
        """Return the model's adapter slots; None if the model does not support adapters."""
        ...


class StagedModel(Model, Protocol):
    """A range of a model's layers: one pipeline stage."""

    def forward(self, batch: ForwardBatch, storage: KVStorage, entering: torch.Tensor | None = None) -> torch.Tensor:
        """`entering` [T, H]: the residual stream of the previous stage; None on the first stage. The last stage returns
        what `Model.forward` does, the others return their residual stream [T, H]."""
        ...


class LoadableAdapters(Protocol):
    """The adapter slots of a model."""

    @property
    def number(self) -> int:
        """The number of slots, which are numbered from 1; 0: no adapter can be loaded."""
        ...

    @property
    def version(self) -> int:
        """A number that changes when steps with adapters start to launch other kernels."""
        ...

    def names(self) -> set[str]:
        """Return the names of the matrices that adapters may change."""
        ...

    def put(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        """Store an adapter in a slot, replacing its previous one."""
        ...


class WeightReader(Protocol):
    """Tensors of a checkpoint under our own names (see TensorSpec)."""

    def get(self, name: str) -> RawTensor: ...
