"""Paged attention against torch's own attention over contiguous keys with an explicit mask."""

from __future__ import annotations

import random
from importlib import import_module

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tokenmill.ops.batch import ForwardBatch, GroupTables, LayerCache
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.reference.attention import attention, plan_attention, write_kv

DIM, SCALE = 8, 0.3
# (tokens in the cache before the step, tokens of the step) of each row
MIXES = {
    "decoding": [(0, 1), (1, 1), (7, 1), (31, 1), (100, 1)],
    "prompts": [(0, 5), (0, 33), (0, 150)],
    "chunks": [(13, 6), (64, 17), (3, 2)],
    "mixed": [(20, 1), (0, 21), (9, 40), (77, 1), (5, 1), (40, 3)],
}


class Case:
    """Rows with random keys, values and queries; the same once contiguous, once in scattered blocks."""

    def __init__(self, mix: list[tuple[int, int]], heads: int, kv_heads: int, block_size: int, stale: float) -> None:
        generator = torch.Generator().manual_seed(len(mix) + heads)
        self.rows = mix
        contexts = [past + new for past, new in mix]
        self.keys = [torch.randn(n, kv_heads, DIM, generator=generator) for n in contexts]
        self.values = [torch.randn(n, kv_heads, DIM, generator=generator) for n in contexts]
        self.queries = [torch.randn(new, heads, DIM, generator=generator) for _, new in mix]
        self.block_size = block_size
        self._scatter(contexts, kv_heads, stale)

    def _scatter(self, contexts: list[int], kv_heads: int, stale: float) -> None:
        size, width = self.block_size, -(-max(contexts) // self.block_size)
        ids = list(range(len(contexts) * width))
        random.Random(1).shuffle(ids)
        self.table = torch.tensor(ids, dtype=torch.int32).view(len(contexts), width)
        shape = (len(ids), kv_heads, size, DIM)
        self.cache = LayerCache(torch.full(shape, stale), torch.full(shape, stale))
        slots = [self._slots(row, range(context)) for row, context in enumerate(contexts)]
        write_kv(self.cache, torch.cat(self.keys), torch.cat(self.values), torch.cat(slots))

    def _slots(self, row: int, positions: range) -> torch.Tensor:
        at = torch.tensor(positions)
        return self.table[row].long()[at // self.block_size] * self.block_size + at % self.block_size

    def batch(self) -> ForwardBatch:
        counts = [new for _, new in self.rows]
        contexts = [past + new for past, new in self.rows]
        positions = torch.cat([torch.arange(past, past + new) for past, new in self.rows])
        return ForwardBatch(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            query_starts=torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            groups=(GroupTables(self.table, torch.zeros_like(positions)),),
            logit_rows=torch.arange(0),
            block_size=self.block_size,
            max_query_len=max(counts),
            max_context_len=max(contexts),
        )

    def paged(self, args: AttentionArgs) -> torch.Tensor:
        return attention(torch.cat(self.queries), self.cache, plan_attention(self.batch(), 0, args.window), args)

    def mask(self, row: int, window: int | None) -> torch.Tensor:
        past, new = self.rows[row]
        distance = torch.arange(past, past + new).view(-1, 1) - torch.arange(past + new)
        return (distance >= 0) & (distance < (window or 10**9))


def torch_attention(case: Case, window: int | None) -> torch.Tensor:
    found = [
        scaled_dot_product_attention(
            queries.transpose(0, 1).double(),
            keys.transpose(0, 1).double(),
            values.transpose(0, 1).double(),
            attn_mask=case.mask(row, window),
            scale=SCALE,
            enable_gqa=True,
        )
        .transpose(0, 1)
        .flatten(1)
        for row, (queries, keys, values) in enumerate(zip(case.queries, case.keys, case.values, strict=True))
    ]
    return torch.cat(found).float()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [None, 1, 5, 16, 70])
@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), [(4, 4, 16), (6, 2, 4), (3, 1, 1)])
def test_equals_torch(mix: str, window: int | None, heads: int, kv_heads: int, block_size: int) -> None:
    case = Case(MIXES[mix], heads, kv_heads, block_size, stale=float("nan"))  # leftovers must not be touched
    found = case.paged(AttentionArgs(SCALE, window))
    torch.testing.assert_close(found, torch_attention(case, window), rtol=1e-5, atol=1e-6)


def written_out(case: Case, args: AttentionArgs) -> torch.Tensor:
    """Soft cap, mask, sinks, softmax: one query and head after another, in float64."""
    lines = []
    for row, queries in enumerate(case.queries):
        mask = case.mask(row, args.window)
        shared = queries.shape[1] // case.keys[row].shape[1]
        for query, seen in zip(queries.double(), mask, strict=True):
            heads = []
            for head, vector in enumerate(query):
                scores = case.keys[row][seen, head // shared].double() @ vector * args.scale
                if args.softcap is not None:
                    scores = args.softcap * torch.tanh(scores / args.softcap)
                weights = scores.exp()
                extra = args.sinks[head].double().exp() if args.sinks is not None else 0.0
                heads.append(weights @ case.values[row][seen, head // shared].double() / (weights.sum() + extra))
            lines.append(torch.cat(heads))
    return torch.stack(lines).float()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_softcap_and_sinks(window: int | None, softcap: float | None, has_sinks: bool) -> None:
    case = Case(MIXES["mixed"], 4, 2, 4, stale=float("nan"))
    args = AttentionArgs(SCALE, window, softcap, torch.randn(4) if has_sinks else None)
    torch.testing.assert_close(case.paged(args), written_out(case, args), rtol=1e-5, atol=1e-6)


def test_neighbours_leave_no_trace_in_a_decoding_row() -> None:
    """Other contents beside a row change no bit of it; without neighbours torch may add in another order."""
    case = Case(MIXES["mixed"], 4, 2, 4, stale=0.0)
    together = case.paged(AttentionArgs(SCALE))
    alone = Case.__new__(Case)
    alone.rows, alone.queries = [case.rows[3]], [case.queries[3]]
    alone.table, alone.cache, alone.block_size = case.table[3:4], case.cache, case.block_size
    at = sum(new for _, new in case.rows[:3])
    torch.testing.assert_close(alone.paged(AttentionArgs(SCALE))[0], together[at], rtol=1e-5, atol=1e-6)
    others = [row for row in range(len(case.rows)) if row != 3]
    for part in (case.cache.keys, case.cache.values):
        part[case.table[others].long().flatten()] *= -3.0
    case.queries = [queries if row == 3 else queries * 2.0 for row, queries in enumerate(case.queries)]
    beside_others = case.paged(AttentionArgs(SCALE))
    assert torch.equal(beside_others[at], together[at]) and not torch.equal(beside_others[0], together[0])


def test_long_rows_are_cut_into_bounded_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("tokenmill.ops.reference.attention")  # the package has a function of that name
    monkeypatch.setattr(module, "MAX_QUERIES", 16)
    monkeypatch.setattr(module, "MAX_GATHERED_KEYS", 64)
    case = Case([(40, 1), (41, 1), (42, 1), (100, 1), (10, 50)], 4, 2, 4, stale=0.0)
    plan = plan_attention(case.batch(), 0, None)
    assert max(task.visible.shape[1] for task in plan) == 16
    assert sorted(task.num_rows for task in plan) == [1] * 8
    torch.testing.assert_close(case.paged(AttentionArgs(SCALE)), torch_attention(case, None), rtol=1e-5, atol=1e-6)


def test_a_window_gathers_only_what_it_sees() -> None:
    case = Case([(1000, 1), (900, 8)], 4, 2, 16, stale=0.0)
    plan = plan_attention(case.batch(), 0, 32)
    assert max(task.visible.shape[2] for task in plan) <= 64
