"""A group of ranks that compute one model together, as models see it.

What ranks have computed comes together in the order of ranks, and sums are added in one order on all of them, so every
rank goes on with the same bits. All ranks call the same collectives in the same order; a wait that a rank's death
would make endless ends with `PeerDied`.

    alone.py     one rank, which has all rows
    threads.py   ranks that are threads of this process (tests)
    turns.py     threads of which one runs at a time: several ranks on one GPU
    shared.py    processes or threads of one host, over shared memory
    gloo.py      processes of any hosts, over TCP
    device.py    processes with GPUs whose kernels reach each other's memory
"""

from __future__ import annotations

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
        """The same as one tensor, [T, sum of widths]."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, W] of this rank → the sum of all ranks', the same bits on each."""
        ...

    def abort(self) -> None:
        """End all waits of this group, here and on other ranks where they can be reached, with PeerDied."""
        ...

    def close(self) -> None:
        """Give back what the group holds."""
        ...


@dataclass(frozen=True)
class Gather:
    """Puts together what ranks have computed of the products with some stacked matrices, or of one activation."""

    group: RankGroup
    parts: tuple[tuple[Cut, bool], ...]  # columns of x, and whether they are gathered

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, this rank's part of each] → [T, all of each], of those that are not gathered this rank's part"""
        rank = self.group.rank
        if len(self.parts) == 1:
            ((cut, _),) = self.parts
            return self.group.join(x, cut.widths)
        own = torch.split(x, [cut.widths[rank] for cut, _ in self.parts], dim=-1)
        gathered = [cut for cut, is_gathered in self.parts if is_gathered]
        going = [part for part, (_, goes) in zip(own, self.parts, strict=True) if goes]
        sent = going[0] if len(going) == 1 else torch.cat(going, dim=-1)
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
    """Adds up what ranks have computed of a product, each with some columns of the matrix."""

    group: RankGroup

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, W] → [T, W]"""
        return self.group.sum(x)


@dataclass(frozen=True)
class GatherRows:
    """Looks up rows of a matrix of which each rank has some."""

    group: RankGroup
    rows: Cut

    def own(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers among this rank's rows, [T]; any where another rank has the row."""
        start, stop = self.rows.spans[self.group.rank]
        return (numbers - start).clamp(0, stop - start - 1)

    def __call__(self, numbers: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Exchange looked-up rows, [T, W]: those this rank found by `own` → each from the rank that has it."""
        pieces = self.group.all_gather(found, [found.shape[-1]] * self.group.size)
        rows = pieces[0]
        for piece, (start, _) in zip(pieces[1:], self.rows.spans[1:], strict=True):
            rows = torch.where(
                (numbers >= start)[:, None], piece, rows
            )  # without a copy from the host: graphs capture it
        return rows


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model: which rows it has, and the group it computes with."""

    group: RankGroup
    cuts: Cuts
    layers: range  # of the whole model's: those of this rank's stage

    def finish_outputs(self, names: Sequence[str], rows: Sequence[int] = ()) -> Gather | Sum | None:
        """Return what makes a product with stacked matrices whole; None where each rank continues with its own part, or
        has all of it. `rows`: of each matrix as this rank has it, where some of several may be whole."""
        cuts = [self.cuts.find(name) for name in names]
        if any(cut is not None and cut.gathered == "sum" for cut in cuts):
            assert len(cuts) == 1, "a matrix whose products are summed is stacked with none"
            return Sum(self.group)
        if not any(cut is not None and cut.gathered == "product" for cut in cuts):
            return None
        return Gather(self.group, tuple(self._part(cut, rows[place : place + 1]) for place, cut in enumerate(cuts)))

    def _part(self, cut: MatrixCut | None, rows: Sequence[int]) -> tuple[Cut, bool]:
        """Return the columns of one matrix's product, and whether they are gathered: those of a whole one are not."""
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
        """The rows of some stacked matrices on all ranks together; 0 where this rank has all of them."""
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
