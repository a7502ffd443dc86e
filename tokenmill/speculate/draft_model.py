"""Speculation with a draft model: a second, smaller model with its own KV cache.

    tokens       t0 … tn                    sampled by the target model
    draft model  t0 … tn │ a  b  c          feeds the new tokens, then its own samples, one after another
    next time    t0 … tn  a  b  x           c was wrong: its cache entry is overwritten, nothing else to undo

The draft model samples with the random numbers that the target model will use at the same positions, so where the two
distributions are close, the samples are mostly equal, greedy or not. Parameters that depend on the history or on a
grammar are left out: they affect what is accepted, not what is proposed.

If the draft model is an MTP head of the target model (`mtp.py`), each of its tokens needs a hidden state of the target
model: its rows begin where such states are available, and what it computed from its own states is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from tokenmill.kv.blocks import BlockTable, HashChain
from tokenmill.kv.cache import KVCache
from tokenmill.params import SamplingParams
from tokenmill.params.sampling import TRUNCATION_PARAMS
from tokenmill.speculate.depth import DraftDepth, StepCost
from tokenmill.speculate.draft_state import AcceptanceRates, DraftRequest, DraftState
from tokenmill.types import RowInit, RowPlan, StepPlan, StepResult

DISTRIBUTION_PARAMS = ("temperature", "dynatemp_range", "dynatemp_exponent", *TRUNCATION_PARAMS)

MAX_DRAFT_MODEL_TOKENS = 8  # each one is a step of the draft model
PRIOR_RATE = 0.7


class PlanRunner(Protocol):
    """The part of a runner that drafting needs: one step at a time, without masks."""

    def launch(self, plan: StepPlan) -> int: ...

    def collect(self, ticket: int) -> StepResult: ...


class States(Protocol):
    """The target model's states that a draft model's tokens need as a second input."""

    def first_token(self, request: DraftRequest) -> int | None:
        """Return the first token of the sequence that can be fed; None if none can."""
        ...

    def can_feed(self, request: DraftRequest, first: int) -> bool:
        """Return whether all tokens from `first` on can be fed."""
        ...

    def feed(self, plans: Sequence[RowPlan], rows: dict[int, DraftRow]) -> None:
        """Pass the states of these plans' tokens to the draft model, before they are run."""
        ...

    def take(self, plans: Sequence[RowPlan], rows: dict[int, DraftRow]) -> None:
        """Keep the output states of rows that sampled, for their next token."""
        ...


@dataclass
class DraftRow:
    """One sequence in the draft model's runner and cache."""

    draft_state: DraftState  # of the sequence that occupies the row
    new: RowInit  # sent to the runner with the first step
    table: BlockTable
    chain: HashChain
    computed: int  # number of its tokens in the cache
    skipped: int = 0  # number of the sequence's tokens before its first one
    num_true: int = 0  # length of the sequence when it was last drafted for
    drafts: list[int] = field(default_factory=list)  # the last drafts; all but the last one are in the cache
    is_on_runner: bool = False
    is_broken: bool = False  # its logits were not finite: no more drafts
    last_used: int = 0


class DraftModel:
    """Keeps the draft model's rows up to date with the target's sequences and samples draft tokens for them."""

    def __init__(
        self, runner: PlanRunner, cache: KVCache, max_context: int, token_budget: int, states: States | None = None
    ) -> None:
        """`states`: the target model's states, for an MTP head."""
        self._runner = runner
        self._states = states
        self._cache = cache
        self._max_context = max_context
        self._token_budget = token_budget
        self._rows: dict[int, DraftRow] = {}
        self._freed: list[int] = []  # freed rows that are not reported to the runner yet
        self._num_rounds = 0
        self.cost = StepCost()

    def draft(self, requests: Sequence[DraftRequest], depths: Sequence[int]) -> list[list[int]]:
        """Sample up to depths[i] draft tokens for requests[i]; fewer where its context or the cache is full."""
        self._num_rounds += 1
        requested = {
            request.row: (request, depth)
            for request, depth in zip(requests, depths, strict=True)
            if depth > 0 and self._can_begin(request)
        }
        rows = {row: self._synced(request) for row, (request, _) in requested.items()}
        open_rows = {
            row: request
            for row, (request, depth) in requested.items()
            if self._reserve(request, rows[row], depth, requested)
        }
        self._catch_up({row: (request, rows[row]) for row, request in open_rows.items()})
        for _ in range(max(depths, default=0) - 1):
            unfinished = [
                (request, rows[row]) for row, request in open_rows.items() if len(rows[row].drafts) < requested[row][1]
            ]
            plans = [self._row_plan(request, row, row.drafts[-1:]) for request, row in unfinished if not row.is_broken]
            if not plans:
                break
            self._run(plans, rows)
        return [rows[request.row].drafts if request.row in open_rows else [] for request in requests]

    def num_behind(self, request: DraftRequest) -> int:
        """Return the number of tokens that the draft model has to feed before its first draft token."""
        row = self._rows.get(request.row)
        if row is not None and row.draft_state is request.draft_state:
            return len(request.tokens) - row.skipped - row.computed
        return len(request.tokens) - ((self._states and self._states.first_token(request)) or 0)

    # ── rows ───────────────────────────────────────────────────────────────────────────────────────────

    def _can_begin(self, request: DraftRequest) -> bool:
        return self._states is None or self._states.first_token(request) is not None

    def _synced(self, request: DraftRequest) -> DraftRow:
        """Return the row of this sequence, with wrong drafts no longer counted as computed."""
        row = self._rows.get(request.row)
        if row is None or row.draft_state is not request.draft_state or row.is_broken:
            row = self._opened(request)
        right = 0
        if self._states is None:
            compared = zip(row.drafts[:-1], request.tokens[row.num_true :], strict=False)
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], compared))
        row.computed = min(row.computed, row.num_true - row.skipped + right, len(request.tokens) - row.skipped - 1)
        if self._states is not None and not self._states.can_feed(request, row.skipped + row.computed):
            row = self._opened(request)
        row.num_true, row.drafts, row.last_used = len(request.tokens), [], self._num_rounds
        if self._states is None:
            self._cache.commit(row.table, row.computed, request.tokens, row.chain)
        return row

    def _opened(self, request: DraftRequest) -> DraftRow:
        if request.row in self._rows:
            self._close(request.row)
        chain = self._cache.chain(request.draft_state.salt)
        skipped = 0 if self._states is None else self._states.first_token(request) or 0
        # An MTP head's cache also depends on states, which the hash of tokens does not cover: it shares no blocks.
        hit = self._cache.match(request.tokens, chain, 0 if self._states else len(request.tokens) - 1)
        table = self._cache.open(hit)
        row = DraftRow(request.draft_state, new_row(request), table, chain, hit.num_tokens, skipped)
        row.num_true = skipped + hit.num_tokens
        self._rows[request.row] = row
        return row

    def _close(self, number: int) -> None:
        row = self._rows.pop(number)
        self._cache.release(row.table)
        if row.is_on_runner:
            self._freed.append(number)

    def _reserve(
        self, request: DraftRequest, row: DraftRow, depth: int, requested: dict[int, tuple[DraftRequest, int]]
    ) -> bool:
        """Reserve blocks for all tokens to feed, if needed by closing rows that are not drafted for now."""
        end = len(request.tokens) - row.skipped + depth - 1
        if end > self._max_context:
            return False
        while (copies := self._cache.reserve(row.table, row.computed, end)) is None:
            idle = [number for number in self._rows if number not in requested]
            if not idle:
                return False
            self._close(min(idle, key=lambda number: self._rows[number].last_used))
        assert not copies, "only full blocks are shared, and those are never written"
        return True

    # ── steps ──────────────────────────────────────────────────────────────────────────────────────────

    def _catch_up(self, requests: dict[int, tuple[DraftRequest, DraftRow]]) -> None:
        """Feed the new tokens of each sequence, in chunks; the last one samples the first draft token."""
        rows = {number: row for number, (_, row) in requests.items()}
        while True:
            left, plans = self._token_budget, []
            for request, row in requests.values():
                first = row.skipped + row.computed
                count = min(left, len(request.tokens) - first)
                if count > 0 and not row.is_broken:
                    plans.append(self._row_plan(request, row, request.tokens[first : first + count]))
                    left -= count
            if not plans:
                return
            self._run(plans, rows)

    def _row_plan(self, request: DraftRequest, row: DraftRow, token_ids: list[int]) -> RowPlan:
        """Plan to feed `token_ids` at `row.computed`; the row samples if that reaches its last token."""
        num_tokens = len(request.tokens) + len(row.drafts)
        return RowPlan(
            row=request.row,
            start=row.computed,
            token_ids=token_ids,
            table_updates=row.table.updates(),
            sample=row.skipped + row.computed + len(token_ids) == num_tokens,
            output_index=num_tokens - request.prompt_len,
        )

    def _run(self, plans: list[RowPlan], rows: dict[int, DraftRow]) -> None:
        new_rows = [rows[plan.row] for plan in plans if not rows[plan.row].is_on_runner]
        freed, self._freed = self._freed, []
        step = StepPlan(new_rows=[row.new for row in new_rows], freed_rows=freed, rows=plans)
        if self._states is not None:
            self._states.feed(plans, rows)
        result = self._runner.collect(self._runner.launch(step))
        if self._states is not None:
            self._states.take(plans, rows)
        self.cost.note(step.num_tokens, result.step_s)
        for row in new_rows:
            row.is_on_runner = True
        for fed, found in zip(plans, result.rows, strict=True):
            row = rows[fed.row]
            row.computed += len(fed.token_ids)
            row.drafts += found.token_ids
            row.is_broken = found.error is not None


def new_row(request: DraftRequest) -> RowInit:
    """Make the draft model's row for a sequence: with its seed, and the parameters that apply to drafts."""
    return RowInit(
        row=request.row,
        params=without_history(request.params),
        seed=request.seed,
        prompt_token_ids=[],
        output_token_ids=[],
        stop_token_ids=[],
    )


def without_history(params: SamplingParams) -> SamplingParams:
    """Return only the parameters that depend on nothing but the logits."""
    return SamplingParams(**{name: getattr(params, name) for name in DISTRIBUTION_PARAMS})


class DraftModelProposer:
    """Proposes draft tokens of the draft model, to the depth that pays."""

    def __init__(self, model: DraftModel, depth: int | None = None) -> None:
        """`depth`: always this many draft tokens, instead of as many as pay."""
        self._model = model
        self._cost = StepCost()
        self._depth = DraftDepth(self._cost, model.cost)
        self._fixed = depth
        self._rates = AcceptanceRates([PRIOR_RATE])

    def propose(self, requests: Sequence[DraftRequest], num_rows: int, num_tokens: int) -> list[list[int]]:
        for request in requests:
            request.draft_state.learn(request.tokens, self._rates, _single_class)
            request.draft_state.propose([], 0, len(request.tokens))
        depth = self._fixed
        if depth is None:
            chances = [self._chances(request) for request in requests]
            num_behind = sum(self._model.num_behind(request) for request in requests)
            depth = self._depth.choose(chances, num_rows, num_tokens, num_behind)
        drafts = self._model.draft(requests, [min(depth, request.max_drafts) for request in requests])
        for request, found in zip(requests, drafts, strict=True):
            request.draft_state.propose(found, 0, len(request.tokens))
        return [list(found) for found in drafts]

    def _chances(self, request: DraftRequest) -> list[float]:
        chance = request.draft_state.acceptance.chance(self._rates.rate(0))
        return [chance**number for number in range(1, min(request.max_drafts, MAX_DRAFT_MODEL_TOKENS) + 1)]

    def note_step(self, num_tokens: int, seconds: float) -> None:
        self._cost.note(num_tokens, seconds)

    def note_end(self, draft_state: DraftState, tokens: Sequence[int], prompt_len: int) -> None:
        """Nothing to do: the next sequence in the same row replaces this one."""


def _single_class(_length: int) -> int:
    return 0
