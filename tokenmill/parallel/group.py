"""Collectives between the ranks that compute one model together, in the form that models use.

Parts are gathered in rank order and sums are added in the same order on every rank, so all ranks continue with the same
bits. All ranks call the same collectives in the same order. If a rank dies, the others' waits end with `PeerDied`.

    SingleRank   a group of one rank, which has all rows
    threads.py   ranks that are threads of this process (tests), also in turns: several ranks on one GPU
    shared.py    processes or threads of one host, over shared memory
    gloo.py      processes of one host, over loopback TCP (torch's gloo)
    device.py    processes with GPUs whose kernels access each other's memory
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill.parallel.cuts import Cut, Cuts, MatrixCut
from tokenmill.parallel.experts import Owners


class RankGroup(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        """x [T, widths[rank]] of this rank → [T, widths[r]] of every rank r."""
        ...

    def join(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [T, widths[rank]] of this rank → [T, sum of widths]: `all_gather`, concatenated."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, W] of this rank → the sum over all ranks, with the same bits on each."""
        ...

    def abort(self) -> None:
        """End all waits of this group with PeerDied, here and, where possible, on the other ranks."""
        ...

    def close(self) -> None:
        """Release the group's resources."""
        ...


class BaseGroup:
    """Implements `join` and `sum` by `all_gather`."""

    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]: ...

    def join(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [T, widths[rank]] of this rank → [T, sum of widths]"""
        return torch.cat(self.all_gather(x, widths), dim=-1)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, W] of this rank → the sum over all ranks, added in rank order in float32 and rounded once"""
        first, *others = self.all_gather(x, [x.shape[-1]] * self.size)
        total = first.float()
        for other in others:
            total = total + other
        return total.to(x.dtype)


class SingleRank(BaseGroup):
    """The group of a rank that has all rows of its matrices: nothing is exchanged."""

    rank = 0
    size = 1

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        return [x]

    def abort(self) -> None:
        """Do nothing: no other rank waits for this one."""

    def close(self) -> None:
        pass


# ── collectives as parts of a model ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Gather:
    """Gathers the ranks' parts of a product with some stacked matrices, or of one activation."""

    group: RankGroup
    parts: tuple[tuple[Cut, bool], ...]  # per stacked matrix: its columns of x, and whether they are gathered

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, this rank's columns of each part] → [T, all columns of gathered parts, this rank's of the others]"""
        rank = self.group.rank
        if len(self.parts) == 1:
            ((cut, _),) = self.parts
            return self.group.join(x, cut.widths)
        own = torch.split(x, [cut.widths[rank] for cut, _ in self.parts], dim=-1)
        gathered = [cut for cut, is_gathered in self.parts if is_gathered]
        own_gathered = [part for part, (_, is_gathered) in zip(own, self.parts, strict=True) if is_gathered]
        sent = own_gathered[0] if len(own_gathered) == 1 else torch.cat(own_gathered, dim=-1)
        widths = [sum(cut.widths[r] for cut in gathered) for r in range(self.group.size)]
        received = [
            iter(torch.split(piece, [cut.widths[r] for cut in gathered], dim=-1))
            for r, piece in enumerate(self.group.all_gather(sent, widths))
        ]
        columns: list[torch.Tensor] = []
        for part, (_, is_gathered) in zip(own, self.parts, strict=True):
            columns += [next(pieces) for pieces in received] if is_gathered else [part]
        return torch.cat(columns, dim=-1)


@dataclass(frozen=True)
class Sum:
    """Sums a product over the ranks, each of which has some columns of the matrix."""

    group: RankGroup

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, W] → [T, W]"""
        return self.group.sum(x)


@dataclass(frozen=True)
class GatherRows:
    """Exchanges looked-up rows of a matrix whose rows are cut over the ranks."""

    group: RankGroup
    rows: Cut

    def own(self, numbers: torch.Tensor) -> torch.Tensor:
        """Map row numbers to this rank's part of the matrix, [T]; arbitrary where another rank has the row."""
        start, stop = self.rows.spans[self.group.rank]
        return (numbers - start).clamp(0, stop - start - 1)

    def __call__(self, numbers: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Exchange looked-up rows, [T, W]: the rows that this rank found by `own` → each from the rank that has it."""
        pieces = self.group.all_gather(found, [found.shape[-1]] * self.group.size)
        rows = pieces[0]
        for piece, (start, _) in zip(pieces[1:], self.rows.spans[1:], strict=True):
            rows = torch.where(
                (numbers >= start)[:, None], piece, rows
            )  # without a copy from the host: graphs capture it
        return rows


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model: its rows of each matrix, its layers, and its group."""

    group: RankGroup
    cuts: Cuts
    layers: range  # the layers of this rank's pipeline stage

    def finish_outputs(self, names: Sequence[str], rows: Sequence[int] = ()) -> Gather | Sum | None:
        """Return the collective that completes a product with stacked matrices; None where each rank continues with its
        own part, or has the whole product. `rows`: how many rows this rank has of each matrix, where some may be
        whole."""
        cuts = [self.cuts.find(name) for name in names]
        if any(cut is not None and cut.gathered == "sum" for cut in cuts):
            assert len(cuts) == 1, "a matrix whose products are summed is not stacked with others"
            return Sum(self.group)
        if not any(cut is not None and cut.gathered == "product" for cut in cuts):
            return None
        return Gather(self.group, tuple(self._part(cut, rows[index : index + 1]) for index, cut in enumerate(cuts)))

    def _part(self, cut: MatrixCut | None, rows: Sequence[int]) -> tuple[Cut, bool]:
        """Return the columns of one matrix's product, and whether they are gathered; a whole matrix's are not."""
        if cut is not None:
            return cut.rows, cut.gathered == "product"
        (count,) = rows
        return Cut(((0, count),) * self.group.size), False

    def gather_inputs(self, name: str) -> Gather | None:
        cut = self.cuts.find(name)
        return None if cut is None or cut.inputs is None else Gather(self.group, ((cut.inputs, True),))

    def gather_rows(self, name: str) -> GatherRows | None:
        cut: MatrixCut | None = self.cuts.find(name)
        return None if cut is None else GatherRows(self.group, cut.rows)

    def own_rows(self, name: str) -> tuple[int, int] | None:
        """Return the rows of a matrix that this rank has; None: all of them."""
        return self.cuts.rows(name)

    def experts(self, name: str) -> Owners | None:
        """Return the ranks that have each expert of a matrix as a whole; None: every rank has some rows of all
        experts."""
        return self.cuts.experts.get(name)

    def whole_rows(self, names: Sequence[str]) -> int:
        """Return the number of rows of stacked matrices over all ranks; 0 where this rank has all of them."""
        cuts = [self.cuts.find(name) for name in names]
        return sum(max(stop for _, stop in cut.rows.spans) for cut in cuts if cut is not None)

    @property
    def rank(self) -> int:
        return self.group.rank

    def borders(self, name: str) -> list[int]:
        """Return the borders of ranks' rows of a matrix whose product is gathered, directly or after an activation;
        empty: this rank computes the whole product."""
        cut = self.cuts.find(name)
        return [] if cut is None or cut.gathered == "attention" else cut.rows.borders

    def input_borders(self, name: str) -> list[int]:
        """Return the borders of ranks' columns of a matrix's input, where ranks have parts of it."""
        cut = self.cuts.find(name)
        return [] if cut is None or cut.inputs is None else cut.inputs.borders
