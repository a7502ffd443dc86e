"""Low-rank updates of adapters, and the interface by which backends hold a model's adapters.

    y = (1 + gain) * (W x) + b (a x) + bias        a [rank, columns], b [rows, rank]

`b` has the adapter's scale in it. `gain` is DoRA's: how much longer the adapted matrix's rows are than its own.

Adapters lie in slots, numbered from 1; 0 is no adapter. A step says which slot each of its tokens uses, and `plan`
works out once what all its products need of that. A projection whose matrices are stacked has a part for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from tokenmill.arch.spec import Activation


@dataclass(frozen=True)
class LowRank:
    """The low-rank update that an adapter adds to a matrix [rows, columns]."""

    a: torch.Tensor  # [rank, columns]
    b: torch.Tensor  # [rows, rank]
    gain: torch.Tensor | None = None  # float32 [rows]

    def some_rows(self, start: int, stop: int) -> LowRank:
        """What is added to some of the matrix's rows."""
        return LowRank(self.a, self.b[start:stop], None if self.gain is None else self.gain[start:stop])

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def num_values(self) -> int:
        return self.a.numel() + self.b.numel() + (0 if self.gain is None else self.gain.numel())


class HeldLowRank(Protocol):
    """The adapters of one projection, in all slots."""

    @property
    def is_active(self) -> bool:
        """False while no adapter has ever added anything here."""
        ...

    def put(self, slot: int, parts: Sequence[LowRank | None]) -> bool:
        """Let a slot hold what an adapter adds to each of the stacked matrices; None: nothing. True where products
        launch other kernels from now on."""
        ...

    def adopt(self, weight: Any) -> Any:
        """The projection's own matrix (`LinearWeight`) as it is kept from now on, perhaps next to its adapters'."""
        ...

    def matrix(self, weight: Any, plan: Any) -> Any:
        """Return the matrix to multiply x by for `add`: the projection's, perhaps with more rows below."""
        ...

    def add(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, plan: Any) -> torch.Tensor:
        """x [T, columns], out [T, rows of `matrix`] with the bias in it → [T, rows] with what each token's adapter
        adds; may change `out`."""
        ...

    def add_gated(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, plan: Any, activation: Activation
    ) -> torch.Tensor:
        """The same for gates above ups: act(gate) * up [T, rows / 2]"""
        ...

    def add_rows(self, numbers: torch.Tensor, out: torch.Tensor, plan: Any) -> torch.Tensor:
        """The same for rows of an embedding [T, columns]: there `a` is [rank, all rows] and `b` [columns, rank]."""
        ...


class ExpertsShape(NamedTuple):
    """The experts of a layer: ups [inter, hidden] each, gates alike where there are any, downs [hidden, inter]"""

    num_experts: int
    hidden: int
    inter: int
    is_gated: bool


class HeldExperts(Protocol):
    """The adapters of a layer's experts, in all slots."""

    def put(self, slot: int, experts: Sequence[tuple[LowRank | None, LowRank | None, LowRank | None]]) -> bool:
        """Let a slot hold what an adapter adds to each expert's gate, up and down. True where steps with adapters
        launch other kernels from now on."""
        ...

    def run(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Any, activation: Activation, plan: Any
    ) -> torch.Tensor:
        """Compute `Ops.experts` with the update of each token's adapter."""
        ...


class LowRankOps(Protocol):
    """A backend's functions for adapters."""

    def plan(self, slots: torch.Tensor) -> Any:
        """int32 [T], each token's slot → what `add` reads; once a step."""
        ...

    def hold(
        self,
        sizes: tuple[int, ...],
        columns: int,
        num_slots: int,
        max_rank: int,
        like: torch.Tensor,
        *,
        is_embedding: bool = False,
    ) -> HeldLowRank:
        """Room for the adapters of a projection with parts of so many rows; dtype and device are those of `like`."""
        ...

    def hold_experts(
        self, shape: ExpertsShape, num_slots: int, max_rank: int, like: torch.Tensor
    ) -> HeldExperts | None:
        """Room for the adapters of a layer's experts; `max_rank` is 0 where none was named when the model was loaded.
        None: there is no room."""
        ...
