"""`LowRankOps` on a GPU: creates the adapter slots of projections (`low_rank.py`) and of experts (`experts.py`)."""

from __future__ import annotations

import torch

from tokenmill.ops.low_rank import ExpertsShape
from tokenmill.ops.triton.adapters.adapted_product import MAX_ROWS, find_present, has_adapted_products
from tokenmill.ops.triton.adapters.experts import TritonLowRankExperts
from tokenmill.ops.triton.adapters.low_rank import TritonLowRank
from tokenmill.ops.triton.adapters.token_slots import MAX_SINGLE, TokenSlots
from tokenmill.ops.triton.launch.pdl import settle


class TritonLowRankOps:
    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic

    def plan(self, slots: torch.Tensor) -> TokenSlots:
        slots, in_tiles = slots.contiguous(), self._deterministic or len(slots) > MAX_SINGLE
        if in_tiles:
            return TokenSlots(slots, in_tiles)
        is_placed = 1 < len(slots) <= MAX_ROWS and has_adapted_products(slots.device)
        present = find_present(slots) if is_placed else None
        settle(slots)
        return TokenSlots(slots, in_tiles, present)

    def hold(
        self,
        sizes: tuple[int, ...],
        columns: int,
        num_slots: int,
        max_rank: int,
        like: torch.Tensor,
        *,
        is_embedding: bool = False,
    ) -> TritonLowRank:
        return TritonLowRank(sizes, columns, num_slots, max_rank, like, is_embedding=is_embedding)

    def hold_experts(
        self, shape: ExpertsShape, num_slots: int, max_rank: int, like: torch.Tensor
    ) -> TritonLowRankExperts | None:
        if not max_rank:
            return None
        return TritonLowRankExperts(shape, num_slots, max_rank, like, deterministic=self._deterministic)
