"""The interface between runner and model, for a decoder made of ops, a native whole-step one and a scripted one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from tokenmill.kv.storage import KVStorage
from tokenmill.ops.batch import DrawingRows, DrawParams, ForwardBatch, Mode
from tokenmill.ops.low_rank import LowRank
from tokenmill.ops.raw import RawTensor


class BestLogits(Protocol):
    def __call__(
        self, hidden: torch.Tensor, mode: Mode = "eager", adapters: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[L, H] → the token with the highest logit, the lowest id among equals, int64 [L]; that logit, float32 [L],
        NaN where any logit of the row is. `adapters`: see `Model.logits`."""
        ...


class DirectModel(Protocol):
    """The whole of a step whose rows only draw: inputs, forward and head in one call, without tensors in between."""

    def greedy_next(self, rows: DrawingRows, storage: KVStorage) -> list[int]:
        """The best next token behind each of the rows' wanted ones; -1 where its logit is no finite number."""
        ...

    def draw_next(self, rows: DrawingRows, params: DrawParams, storage: KVStorage) -> list[int]:
        """The same with tokens drawn as the parameters say."""
        ...

    def logits_next(self, rows: DrawingRows, storage: KVStorage) -> torch.Tensor:
        """The logits behind each of the rows' wanted tokens, float32 [L, vocab], in memory that the next call uses."""
        ...


class Model(Protocol):
    @property
    def vocab_size(self) -> int: ...

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        """Feeds the batch's tokens, writes their keys and values; normed hidden states [L, H] of `logit_rows`."""
        ...

    def logits(self, hidden: torch.Tensor, mode: Mode = "eager", adapters: torch.Tensor | None = None) -> torch.Tensor:
        """[L, H] → float32 [L, vocab]; `adapters` int32 [L]: the slot of each state's adapter, 0 for none"""
        ...

    @property
    def best_logits(self) -> BestLogits | None:
        """Return a faster way to the most likely tokens than all logits; None: there is none."""
        ...

    @property
    def direct(self) -> DirectModel | None:
        """Return the call that takes rows as plain lists; None: the model takes tensors only."""
        ...

    @property
    def adapter_slots(self) -> HeldAdapters | None:
        """Return the model's adapter slots; None: it can't have adapters."""
        ...


class StagedModel(Model, Protocol):
    """Some of the layers of a model, as one stage of a pipeline computes them."""

    def forward(self, batch: ForwardBatch, storage: KVStorage, entering: torch.Tensor | None = None) -> torch.Tensor:
        """`entering` [T, H]: the stream as the stage before has left it; None: this is the first one. The last stage
        returns what `Model.forward` does, the others their stream [T, H]."""
        ...


class HeldAdapters(Protocol):
    """The adapter slots of a model."""

    @property
    def number(self) -> int:
        """Slots are numbered from 1 to this; 0: it can hold none."""
        ...

    @property
    def version(self) -> int:
        """A number that changes when steps with adapters launch other kernels than before."""
        ...

    def names(self) -> set[str]:
        """Return the names of the matrices that adapters may change."""
        ...

    def put(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        """Let a slot hold an adapter, in place of the one that it holds."""
        ...


class WeightReader(Protocol):
    """Tensors of a checkpoint under our own names (see TensorSpec)."""

    def get(self, name: str) -> RawTensor: ...
