"""Speculation with a second, smaller model: it runs ahead of the large one in a KV cache of its own.

    tokens       t0 … tn                    what is true
    draft model  t0 … tn │ a  b  c          feeds what is new of the true ones, then its own draws, one after the other
    next time    t0 … tn  a  b  x           c was wrong: its cell is written again, nothing else to undo

Its draws use the random numbers that the large model will use at the same places, so where the two distributions are
close the draws are mostly equal, greedy or not. Knobs that look at the history or at a grammar are left to the large
model: they decide what is right, not what is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from tokenmill.kv.block_table import BlockTable
from tokenmill.kv.cache import KVCache
from tokenmill.kv.prefix import HashChain
from tokenmill.params import SamplingParams
from tokenmill.params.sampling import TRUNCATION_PARAMS
from tokenmill.speculate.draft_request import DraftRequest
from tokenmill.speculate.draft_state import DraftState
from tokenmill.speculate.step_cost import StepCost
from tokenmill.types import RowInit, RowPlan, StepPlan, StepResult

DISTRIBUTION_PARAMS = ("temperature", "dynatemp_range", "dynatemp_exponent", *TRUNCATION_PARAMS)


class PlanRunner(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...


@dataclass
class DraftRow:
    """What the draft model holds of one sequence."""

    draft_state: DraftState  # whose it is
    new: RowInit  # how the runner gets to know it
    table: BlockTable
    chain: HashChain
    computed: int
    num_true: int = 0  # of the sequence's tokens when it was last drafted for
    drafts: list[int] = field(default_factory=list)  # drawn then; all but the last are in the cache
    is_known: bool = False  # to the runner
    is_broken: bool = False  # its numbers are not finite: no guesses from it
    last_used: int = 0


class DraftModel:
    def __init__(self, runner: PlanRunner, cache: KVCache, max_context: int, token_budget: int) -> None:
        self._runner = runner
        self._cache = cache
        self._max_context = max_context
        self._token_budget = token_budget
        self._rows: dict[int, DraftRow] = {}
        self._left: list[int] = []  # rows to tell the runner of
        self._num_rounds = 0
        self.cost = StepCost()

    def draft(self, requests: Sequence[DraftRequest], depths: Sequence[int]) -> list[list[int]]:
        """Up to depths[i] guesses for asks[i]; fewer where its context or the cache is full."""
        self._num_rounds += 1
        wanted = {request.row: (request, depth) for request, depth in zip(requests, depths, strict=True) if depth > 0}
        rows = {row: self._synced(request) for row, (request, _) in wanted.items()}
        open_rows = {
            row: request
            for row, (request, depth) in wanted.items()
            if self._has_room(request, rows[row], depth, wanted)
        }
        self._catch_up({row: (request, rows[row]) for row, request in open_rows.items()})
        for _ in range(max(depths, default=0) - 1):
            going = [
                (request, rows[row]) for row, request in open_rows.items() if len(rows[row].drafts) < wanted[row][1]
            ]
            plans = [self._fed(request, row, row.drafts[-1:]) for request, row in going if not row.is_broken]
            if not plans:
                break
            self._run(plans, rows)
        return [rows[request.row].drafts if request.row in open_rows else [] for request in requests]

    def num_behind(self, request: DraftRequest) -> int:
        """Tokens that the draft model has to feed before its first guess."""
        row = self._rows.get(request.row)
        return len(request.tokens) - (row.computed if row is not None and row.draft_state is request.draft_state else 0)

    # ── rows ───────────────────────────────────────────────────────────────────────────────────────────

    def _synced(self, request: DraftRequest) -> DraftRow:
        """The row of this sequence, with only true tokens counted as computed."""
        row = self._rows.get(request.row)
        if row is None or row.draft_state is not request.draft_state or row.is_broken:
            row = self._opened(request)
        compared = zip(row.drafts[:-1], request.tokens[row.num_true :], strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], compared))
        row.computed = min(row.computed, row.num_true + right, len(request.tokens) - 1)
        row.num_true, row.drafts, row.last_used = len(request.tokens), [], self._num_rounds
        self._cache.commit(row.table, row.computed, request.tokens, row.chain)
        return row

    def _opened(self, request: DraftRequest) -> DraftRow:
        if request.row in self._rows:
            self._close(request.row)
        chain = self._cache.chain(request.draft_state.salt)
        hit = self._cache.match(request.tokens, chain, len(request.tokens) - 1)
        table = self._cache.open(hit)
        row = DraftRow(request.draft_state, new_row(request), table, chain, hit.num_tokens, num_true=hit.num_tokens)
        self._rows[request.row] = row
        return row

    def _close(self, number: int) -> None:
        row = self._rows.pop(number)
        self._cache.release(row.table)
        if row.is_known:
            self._left.append(number)

    def _has_room(
        self, request: DraftRequest, row: DraftRow, depth: int, wanted: dict[int, tuple[DraftRequest, int]]
    ) -> bool:
        """Blocks for all that will be fed, if need be those of sequences that are not drafted for now."""
        end = len(request.tokens) + depth - 1
        if end > self._max_context:
            return False
        while (copies := self._cache.reserve(row.table, row.computed, end)) is None:
            idle = [number for number in self._rows if number not in wanted]
            if not idle:
                return False
            self._close(min(idle, key=lambda number: self._rows[number].last_used))
        assert not copies, "only full blocks are shared, and those are never written"
        return True

    # ── steps ──────────────────────────────────────────────────────────────────────────────────────────

    def _catch_up(self, asked: dict[int, tuple[DraftRequest, DraftRow]]) -> None:
        """Feeds what is true and new, in chunks; the last token of it draws the first guess."""
        rows = {number: row for number, (_, row) in asked.items()}
        while True:
            left, plans = self._token_budget, []
            for request, row in asked.values():
                count = min(left, len(request.tokens) - row.computed)
                if count > 0 and not row.is_broken:
                    plans.append(self._fed(request, row, request.tokens[row.computed : row.computed + count]))
                    left -= count
            if not plans:
                return
            self._run(plans, rows)

    def _fed(self, request: DraftRequest, row: DraftRow, token_ids: list[int]) -> RowPlan:
        """`row.computed` is where the tokens go; they draw if they reach to the last one there is."""
        num_tokens = len(request.tokens) + len(row.drafts)
        return RowPlan(
            row=request.row,
            start=row.computed,
            token_ids=token_ids,
            table_updates=row.table.updates(),
            sample=row.computed + len(token_ids) == num_tokens,
            output_index=num_tokens - request.prompt_len,
        )

    def _run(self, plans: list[RowPlan], rows: dict[int, DraftRow]) -> None:
        unknown = [rows[plan.row] for plan in plans if not rows[plan.row].is_known]
        left, self._left = self._left, []
        step = StepPlan(new_rows=[row.new for row in unknown], freed_rows=left, rows=plans)
        result = self._runner.run(step)
        self.cost.note(step.num_tokens, result.step_s)
        for row in unknown:
            row.is_known = True
        for fed, found in zip(plans, result.rows, strict=True):
            row = rows[fed.row]
            row.computed += len(fed.token_ids)
            row.drafts += found.token_ids
            row.is_broken = found.error is not None


def new_row(request: DraftRequest) -> RowInit:
    return RowInit(
        row=request.row,
        params=without_history(request.params),
        seed=request.seed,
        prompt_token_ids=[],
        output_token_ids=[],
        stop_token_ids=[],
    )


def without_history(params: SamplingParams) -> SamplingParams:
    """The parameters that shape a draw by its own logits alone."""
    return SamplingParams(**{name: getattr(params, name) for name in DISTRIBUTION_PARAMS})
