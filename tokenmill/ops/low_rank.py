"""Low-rank updates of adapters (LoRA, DoRA), and the interface by which backends store and apply them.

    y = (1 + gain) * (W x) + b (a x) + bias        a [rank, columns], b [rows, rank]

`b` includes the adapter's scale. `gain` is DoRA's: the relative change in the length of each row of the matrix.

Adapters are stored in slots, numbered from 1; 0 means no adapter. A step names the slot of each token, from which
`plan` prepares, once per step, what all products need. A projection of stacked matrices has a part for each of them.
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
        """Return the update of rows [start, stop) of the matrix."""
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
        """False until an adapter that changes this projection has been loaded."""
        ...

    def put(self, slot: int, parts: Sequence[LowRank | None]) -> bool:
        """Store an adapter's updates of the stacked matrices in a slot; None: that matrix is not changed. Returns True
        if products launch other kernels from now on."""
        ...

    def adopt(self, weight: Any) -> Any:
        """Return the projection's `LinearWeight` as it is stored from now on, possibly in one buffer with adapters."""
        ...

    def matrix(self, weight: Any, plan: Any) -> Any:
        """Return the matrix by which x is multiplied before `add`: the projection's, possibly with rows of adapters."""
        ...

    def product(self, x: torch.Tensor, weight: Any, plan: Any) -> torch.Tensor | None:
        """Multiply by the projection's matrix and add each token's update in one kernel: [T, columns] → [T, rows].
        None: there is no such kernel, and `add` follows the product with `matrix`."""
        ...

    def add(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, plan: Any) -> torch.Tensor:
        """x [T, columns], out [T, rows of `matrix`] including the bias → [T, rows] with each token's update added; may
        overwrite `out`."""
        ...

    def add_gated(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, plan: Any, activation: Activation
    ) -> torch.Tensor:
        """`add` for gate rows stacked above up rows, followed by act(gate) * up: → [T, rows / 2]"""
        ...

    def add_rows(self, numbers: torch.Tensor, out: torch.Tensor, plan: Any) -> torch.Tensor:
        """`add` for looked-up rows of an embedding [T, columns], where `a` is [rank, all rows], `b` [columns, rank]."""
        ...


class ExpertsShape(NamedTuple):
    """The experts of a layer: up and, if gated, gate [inter, hidden] each; down [hidden, inter]."""

    num_experts: int
    hidden: int
    inter: int
    is_gated: bool


class HeldExperts(Protocol):
    """The adapters of a layer's experts, in all slots."""

    def put(self, slot: int, experts: Sequence[tuple[LowRank | None, LowRank | None, LowRank | None]]) -> bool:
        """Store an adapter's updates of each expert's gate, up and down in a slot. Returns True if steps with adapters
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
        """Prepare what `add` reads from each token's slot, int32 [T]; called once per step."""
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
        """Allocate slots for the adapters of a projection whose stacked matrices have `sizes` rows; with the dtype and
        device of `like`."""
        ...

    def hold_experts(
        self, shape: ExpertsShape, num_slots: int, max_rank: int, like: torch.Tensor
    ) -> HeldExperts | None:
        """Allocate slots for adapters of a layer's experts; `max_rank` is 0 if none was configured at load. None: the
        backend can't adapt these experts."""
        ...
