"""Rows of a recurrent mixer whose projections are given, computed by one table of ops in chunks of any size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.support.paged_run import CPU, shuffled
from tokenmill.arch.recurrent import Recurrent
from tokenmill.ops.batch import ForwardBatch, GroupTables
from tokenmill.ops.interface import Ops
from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache, RecurrentWeights

BLOCK_SIZE, NUM_BLOCKS = 16, 9


@dataclass
class Sequences:
    """Rows whose projections are given, computed by one table of ops in chunks of any size."""

    ops: Ops
    args: RecurrentArgs
    cache: RecurrentCache
    cells: torch.Tensor
    states: torch.Tensor
    lengths: list[int]

    @classmethod
    def of(
        cls, ops: Ops, spec: Recurrent, dtype: torch.dtype, num_rows: int = 2, device: torch.device = CPU
    ) -> Sequences:
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        weights = RecurrentWeights(
            conv=random(spec.conv_size, spec.kernel),
            conv_bias=random(spec.conv_size) if spec.conv_bias else None,
            rates=-random(spec.value_heads).abs(),
            step_bias=random(spec.num_decays) - 2,
            skip=random(spec.value_heads) if spec.rule == "ssd" else None,
            norm=None if spec.norm is None else random(spec.value_dim if spec.norm.is_shared else spec.values_size),
            eps=1e-6,
        )
        decays: tuple[int, ...] = (BLOCK_SIZE, spec.value_heads)
        if spec.has_channel_decays:
            decays = (spec.value_heads, BLOCK_SIZE, spec.key_dim)
        num_cells, num_states = 1 + num_rows * NUM_BLOCKS, 1 + num_rows * NUM_BLOCKS

        def kept(count: int, *shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.full((count, *shape), 7.0, dtype=dtype, device=device)

        cache = RecurrentCache(
            kept(num_cells, BLOCK_SIZE, spec.conv_size),
            kept(num_cells, spec.key_heads, BLOCK_SIZE, spec.key_dim),
            kept(num_cells, spec.value_heads, BLOCK_SIZE, spec.value_dim),
            kept(num_cells, *decays, dtype=torch.float32),
            kept(num_states, spec.value_heads, spec.key_dim, spec.value_dim, dtype=torch.float32),
            kept(num_states, spec.kernel - 1, spec.conv_size),
        )
        tables = (shuffled(num_rows, NUM_BLOCKS).to(device), shuffled(num_rows, NUM_BLOCKS).to(device))
        return cls(ops, RecurrentArgs(spec, weights), cache, *tables, [0] * num_rows)

    def feed(self, projected: dict[int, torch.Tensor]) -> torch.Tensor:
        rows, counts = list(projected), [len(part) for part in projected.values()]
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
        device = self.cells.device
        contexts = torch.tensor([self.lengths[row] for row in rows], dtype=torch.int32, device=device)
        starts = torch.tensor([0, *counts], dtype=torch.int32, device=device)
        batch = ForwardBatch(
            token_ids=torch.zeros(sum(counts), dtype=torch.int64, device=device),
            positions=torch.zeros(sum(counts), dtype=torch.int64, device=device),
            query_starts=starts.cumsum(0, dtype=torch.int32),
            context_lens=contexts,
            groups=tuple(GroupTables(table[rows], table.new_empty(0)) for table in (self.cells, self.states)),
            logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
            block_size=BLOCK_SIZE,
            max_query_len=max(counts),
            max_context_len=max(self.lengths),
            num_single=sum(1 for number, count in enumerate(counts) if counts[: number + 1] == [1] * (number + 1)),
        )
        plan = self.ops.plan_recurrent(batch, 0, 1)
        return self.ops.recurrent(torch.cat(list(projected.values())), self.cache, plan, self.args)

    def all_of(self, row: int, projected: torch.Tensor, cuts: list[int]) -> torch.Tensor:
        return torch.cat([self.feed({row: part}) for part in torch.split(projected, cuts)])


def projections(spec: Recurrent, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, spec.projected_size).to(dtype)


def require_same_memory(found: Sequences, expected: Sequences, tolerance: float) -> None:
    """Require equal memory; entries that were never written, including null blocks, still have their initial 7."""
    for name in ("conv_inputs", "keys", "updates", "decays", "states", "tails"):
        ours, theirs = getattr(found.cache, name).float(), getattr(expected.cache, name).float()
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance, msg=name)
