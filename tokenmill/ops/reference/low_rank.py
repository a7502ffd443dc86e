"""Adapters in torch: one pair of small products per adapter, for all of its tokens together.

A token's result must not depend on the others, so both products use `multiply`, whose order of summation is the same
for any number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from tokenmill.arch.spec import Activation
from tokenmill.ops.interface import ExpertsWeight, LinearWeight
from tokenmill.ops.low_rank import ExpertsShape, LowRank
from tokenmill.ops.reference.elementwise import act_mul
from tokenmill.ops.reference.experts import Adapt, experts
from tokenmill.ops.reference.linear import multiply


class TokensBySlot(NamedTuple):
    """The tokens of a step that use adapters."""

    slots: torch.Tensor  # [T]
    tokens: dict[int, torch.Tensor]  # token indices by slot, without slot 0


class ReferenceLowRankOps:
    def plan(self, slots: torch.Tensor) -> TokensBySlot:
        used = [slot for slot in torch.unique(slots).tolist() if slot]
        return TokensBySlot(slots, {slot: (slots == slot).nonzero().view(-1) for slot in used})

    def hold(
        self,
        sizes: tuple[int, ...],
        columns: int,
        num_slots: int,
        max_rank: int,
        like: torch.Tensor,
        *,
        is_embedding: bool = False,
    ) -> ReferenceLowRank:
        return ReferenceLowRank(sizes, like)

    def hold_experts(
        self, shape: ExpertsShape, num_slots: int, max_rank: int, like: torch.Tensor
    ) -> ReferenceLowRankExperts:
        return ReferenceLowRankExperts(like)


class ReferenceLowRank:
    def __init__(self, sizes: tuple[int, ...], like: torch.Tensor) -> None:
        self._starts = [0, *accumulate(sizes)]
        self._like = like
        self._slots: dict[int, list[tuple[int, LowRank]]] = {}  # by slot: first row and part

    @property
    def is_active(self) -> bool:
        return any(self._slots.values())

    def put(self, slot: int, parts: Sequence[LowRank | None]) -> bool:
        found = zip(self._starts, parts, strict=False)
        self._slots[slot] = [(first, on_device(part, self._like)) for first, part in found if part is not None]
        return False

    def adopt(self, weight: LinearWeight) -> LinearWeight:
        return weight

    def matrix(self, weight: LinearWeight, plan: TokensBySlot) -> LinearWeight:
        return weight

    def product(self, x: torch.Tensor, weight: LinearWeight, plan: TokensBySlot) -> None:
        return None

    def add(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, plan: TokensBySlot) -> torch.Tensor:
        for slot, tokens in plan.tokens.items():
            for first, part in self._slots.get(slot, ()):
                rows = slice(first, first + part.b.shape[0])
                own_bias = None if bias is None else bias[rows]
                out[tokens, rows] = adapted(x[tokens], out[tokens, rows], own_bias, part)
        return out

    def add_gated(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, plan: TokensBySlot, activation: Activation
    ) -> torch.Tensor:
        return act_mul(self.add(x, out, bias, plan), activation)

    def add_rows(self, numbers: torch.Tensor, out: torch.Tensor, plan: TokensBySlot) -> torch.Tensor:
        for slot, tokens in plan.tokens.items():
            for _, part in self._slots.get(slot, ()):
                out[tokens] += multiply(part.a[:, numbers[tokens]].t().contiguous(), part.b)
        return out


class ReferenceLowRankExperts:
    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._slots: dict[int, list[tuple[LowRank | None, ...]]] = {}

    def put(self, slot: int, experts: Sequence[tuple[LowRank | None, LowRank | None, LowRank | None]]) -> bool:
        self._slots[slot] = [tuple(part and on_device(part, self._like) for part in parts) for parts in experts]
        return False

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        packed: ExpertsWeight,
        activation: Activation,
        plan: TokensBySlot,
    ) -> torch.Tensor:
        return experts(
            x,
            weights,
            ids,
            packed,
            activation,
            lambda expert, tokens: self._adapting(expert, plan.slots[tokens], is_gated=packed.is_gated),
        )

    def _adapting(self, expert: int, slots: torch.Tensor, *, is_gated: bool) -> tuple[Adapt, Adapt] | None:
        """Return the functions that adapt an expert's gate/up product and its down product; None if no row needs it."""
        rows = {
            slot: (slots == slot).nonzero().view(-1) for slot in torch.unique(slots).tolist() if slot in self._slots
        }

        def add_to_inner(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            middle = out.shape[1] // 2 if is_gated else 0
            for slot, own in rows.items():
                gate, up, _ = self._slots[slot][expert]
                for part, span in ((gate, slice(0, middle)), (up, slice(middle, None))):
                    if part is not None:
                        out[own, span] = adapted(x[own], out[own, span], None, part)
            return out

        def add_to_down(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            for slot, own in rows.items():
                down = self._slots[slot][expert][2]
                if down is not None:
                    out[own] = adapted(x[own], out[own], None, down)
            return out

        return (add_to_inner, add_to_down) if rows else None


def adapted(x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, part: LowRank) -> torch.Tensor:
    """Turn a product of x [T, columns] and a matrix, [T, rows], into that of x and the adapted matrix."""
    if part.gain is not None:
        own = out if bias is None else out - bias
        out = (out + own * part.gain).to(out.dtype)
    return out + multiply(multiply(x, part.a), part.b)


def on_device(part: LowRank, like: torch.Tensor) -> LowRank:
    gain = None if part.gain is None else part.gain.to(like.device)
    return LowRank(part.a.to(like), part.b.to(like), gain)
