"""A runner without a model that checks the plans it receives.

Its KV memory holds, for every slot, the position and a hash of all tokens up to it: what a key or value depends on in a
real model. It applies copies, table updates and writes as the real runner does; then every row reads its context
through its block table. A cell that does not hold exactly that sequence's history is an error. A sampled token is a
pure function of (seed, output index, history), so the expected tokens of a request are known.

Several steps may be in flight. What a plan assumes about blocks must hold when it is launched; it is computed, in
order, at a random moment between launch and collect.
"""

from __future__ import annotations

import random
from collections import deque

import msgspec

from tokenmill.kv.cache import KVCache
from tokenmill.kv.layout import EntryRule
from tokenmill.scheduler.request import mixed_seed
from tokenmill.types import (
    PENDING,
    BlockTableUpdate,
    ContextShift,
    Request,
    RowInit,
    RowPlan,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

VOCAB = 50
EOS = 0
_MASK = 2**64 - 1


def mix(*numbers: int) -> int:
    state = 0x243F6A8885A308D3
    for number in numbers:
        state = ((state ^ (number & _MASK)) * 0x9E3779B97F4A7C15) & _MASK
        state ^= state >> 29
    return state


def histories(tokens: list[int], known: list[int]) -> list[int]:
    """Extend `known` so that entry i represents tokens[: i + 1]."""
    for index in range(len(known), len(tokens)):
        known.append(mix(known[-1] if known else 7, tokens[index]))
    return known


def top_logprobs(history: int, count: int) -> tuple[list[int], list[float]]:
    """Return the most likely next tokens: a permutation and falling logprobs, both derived from the history."""
    first, logprob = mix(history, 1) % VOCAB, 0.0
    ids = [(first + 7 * i) % VOCAB for i in range(min(count, VOCAB))]
    logprobs = []
    for token_id in ids:
        logprob -= 0.05 + (mix(history, token_id) % 1000) / 700
        logprobs.append(logprob)
    return ids, logprobs


def drawn(seed: int, output_index: int, history: int) -> int:
    return mix(seed, output_index, history) % VOCAB


def drawn_logprob(history: int, token_id: int) -> float:
    return -(mix(history, token_id, 3) % 4096) / 512


def expected_tokens(request: Request, index: int) -> list[int]:
    """Return the tokens that sample `index` of a request must have, whatever else is running."""
    tokens, seed = list(request.prompt_token_ids), mixed_seed(request.seed, index)
    stops = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else set(request.eos_token_ids))
    for output_index in range(request.max_tokens):
        token = drawn(seed, output_index, histories(in_sight(tokens, request.shift), [])[-1])
        if output_index + 1 < request.params.min_tokens and token in stops:
            token = 1 + EOS
        tokens.append(token)
        if token in stops and output_index + 1 >= request.params.min_tokens:
            break
    return tokens[len(request.prompt_token_ids) :]


def in_sight(tokens: list[int], shift: ContextShift | None) -> list[int]:
    """Return the tokens that the next one may depend on."""
    while shift is not None and len(tokens) > shift.context:
        tokens = tokens[: shift.keep] + tokens[shift.keep + shift.drop :]
    return tokens


class SimulatedRow:
    def __init__(self, new: RowInit, num_groups: int) -> None:
        self.new = new
        self.tokens = new.prompt_token_ids + new.output_token_ids
        self.known: list[int] = []
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.fed = self.tokens  # including the drafts of this step
        self.num_fed = 0
        self.num_dropped = 0

    def window(self, num_dropped: int, shift: ContextShift | None) -> list[int]:
        if num_dropped != self.num_dropped:
            self.num_dropped, self.known = num_dropped, []
        keep = shift.keep if shift else 0
        return self.tokens[:keep] + self.tokens[keep + num_dropped :]


def updated(cache: KVCache, tables: list[list[int]], updates: list[BlockTableUpdate]) -> None:
    """Turn rows of the groups' tensors into block ids."""
    for update in updates:
        table = tables[update.group]
        assert update.start <= len(table), "a table update leaves a hole"
        before = cache.pool.firsts[cache.rules[update.group].region] - 1
        table[update.start : update.start + len(update.blocks)] = [block and block + before for block in update.blocks]


class SimulatedRunner:
    def __init__(self, cache: KVCache, seed: int = 0) -> None:
        self.cache = cache
        self.memory: dict[int, list[tuple[int, int] | None]] = {}
        self.rows: dict[int, SimulatedRow] = {}
        self.fail_rows_of: set[int] = set()  # seeds whose rows report an error
        self.shifts: dict[int, ContextShift] = {}  # by seed of the row
        self._random = random.Random(seed)
        self._launched: deque[StepPlan] = deque()  # launched and not computed yet
        self._results: dict[int, StepResult] = {}  # computed and not collected yet
        self._tables: dict[int, list[list[int]]] = {}  # block tables as of the last launch
        self._writes: dict[int, set[int]] = {}  # by step in flight: the blocks that it writes

    def run(self, plan: StepPlan) -> StepResult:
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> int:
        self._check_blocks(plan)
        self._launched.append(plan)
        while self._launched and self._random.random() < 0.3:
            self._compute_next()
        return plan.step

    def collect(self, ticket: int) -> StepResult:
        while ticket not in self._results:
            self._compute_next()
        del self._writes[ticket]
        return self._results.pop(ticket)

    @property
    def num_in_flight(self) -> int:
        return len(self._writes)

    def blocks_in_flight(self) -> set[int]:
        return set().union(*self._writes.values())

    def _check_blocks(self, plan: StepPlan) -> None:
        """Require that every block that a plan writes belongs to exactly one table and is not registered yet."""
        for row in plan.freed_rows:
            del self._tables[row]
        for new in plan.new_rows:
            self._tables[new.row] = [[] for _ in self.cache.rules]
        writes = self._writes[plan.step] = {to for _, to in plan.copies}
        for row_plan in plan.rows:
            tables = self._tables[row_plan.row]
            updated(self.cache, tables, row_plan.table_updates)
            for rule, table in zip(self.cache.rules, tables, strict=True):
                for entry in rule.written(row_plan.start, row_plan.start + len(row_plan.token_ids)):
                    block = table[entry]  # null for freed entries: the row may have had other tables before
                    if block == 0 and rule.kind != "paged":
                        continue  # blocks that no later query sees are not kept
                    assert block != 0, "the null block is written"
                    assert self.cache.pool.refs[block] == 1, "a shared block is written"
                    # A block is registered when it is full, and a full block is never written.
                    assert not self.cache.prefix.has(block), "a registered block is written"
                    writes.add(block)

    def _compute_next(self) -> None:
        plan = self._launched.popleft()
        for row in plan.freed_rows:
            del self.rows[row]
        for new in plan.new_rows:
            assert new.row not in self.rows, "a row was given away while it was taken"
            self.rows[new.row] = SimulatedRow(new, len(self.cache.rules))
        self._copy(plan.copies)
        rows = [self._filled(row) for row in plan.rows]
        for row_plan in rows:
            self._write(row_plan)
        results = [self._read(row_plan) for row_plan in rows]
        self._results[plan.step] = StepResult(step=plan.step, rows=results, step_s=0.001 * (1 + plan.num_tokens))

    def _filled(self, plan: RowPlan) -> RowPlan:
        if plan.token_ids != [PENDING]:
            assert PENDING not in plan.token_ids
            return plan
        return msgspec.structs.replace(plan, token_ids=self.rows[plan.row].tokens[-1:])

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        targets = [to for _, to in copies]
        assert len(set(targets)) == len(targets), "two copies into one block"
        contents = [list(self._block(source)) for source, _ in copies]
        for target, cells in zip(targets, contents, strict=True):
            self.memory[target] = cells

    def _block(self, block: int) -> list[tuple[int, int] | None]:
        return self.memory.setdefault(block, [None] * self.cache.block_size)

    def _write(self, plan: RowPlan) -> None:
        row = self.rows[plan.row]
        updated(self.cache, row.tables, plan.table_updates)
        end, own_end = plan.start + len(plan.token_ids), own_end_of(plan)
        drafts = plan.token_ids[own_end - plan.start :]
        window = row.window(plan.num_dropped, self.shifts.get(row.new.seed))
        assert own_end > plan.start and plan.token_ids[: own_end - plan.start] == window[plan.start : own_end]
        assert not drafts or (plan.sample and own_end == len(window)), "drafts before the last token is computed"
        row.fed = window + drafts
        assert plan.output_index == len(row.tokens) - len(row.new.prompt_token_ids)
        row.known = histories(row.fed, row.known[: len(window)])
        row.num_fed += len(plan.token_ids)
        for rule, table in zip(self.cache.rules, row.tables, strict=True):
            self._read_before(rule, table, plan, row)
            for position in range(plan.start, end):
                entry = position // rule.tokens
                if rule.kind == "state" and (position + 1) % rule.tokens:
                    continue
                if table[entry]:
                    at = 0 if rule.kind == "state" else position % rule.tokens
                    self._block(table[entry])[at] = (position, row.known[position])

    def _read_before(self, rule: EntryRule, table: list[int], plan: RowPlan, row: SimulatedRow) -> None:
        """Check what a step reads of cells and states, except what it writes itself."""
        begin = plan.start // self.cache.rules[-1].chunk * self.cache.rules[-1].chunk
        if rule.kind == "cells":
            for position in range(begin, plan.start):
                self._expect(table[position // rule.tokens], position % rule.tokens, position, plan, row)
        elif rule.kind == "state" and begin:
            self._expect(table[begin // rule.tokens - 1], 0, begin - 1, plan, row)

    def _expect(self, block: int, at: int, position: int, plan: RowPlan, row: SimulatedRow) -> None:
        cell = self._block(block)[at] if block else None
        assert cell == (position, row.known[position]), f"row {plan.row} reads {cell} at {position}"

    def _read(self, plan: RowPlan) -> RowResult:
        row, end = self.rows[plan.row], plan.start + len(plan.token_ids)
        for rule, table in zip(self.cache.rules, row.tables, strict=True):
            if rule.kind != "paged":
                continue
            first = 0 if rule.window is None else max(0, plan.start - rule.window + 1)
            for position in range(first, end):
                self._expect(table[position // rule.tokens], position % rule.tokens, position, plan, row)
        result = self._result(plan, row, own_end_of(plan))
        return RowResult(row=plan.row, error="not a number") if row.new.seed in self.fail_rows_of else result

    def _result(self, plan: RowPlan, row: SimulatedRow, end: int) -> RowResult:
        is_last = end + plan.num_dropped == len(row.tokens)
        assert plan.sample <= is_last, "a draw before the last token is computed"
        shift = self.shifts.get(row.new.seed)
        assert shift is None or end + plan.num_drafts <= shift.context, "a position beyond the context"
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] | None = [] if plan.sample and plan.num_logprobs is not None else None
        for place in range(plan.num_drafts + 1 if plan.sample else 0):
            history = row.known[end - 1 + place]
            token_ids.append(self._draw(plan, row, history, plan.output_index + place))
            if logprobs is not None and plan.num_logprobs is not None:
                top = top_logprobs(history, plan.num_logprobs)
                logprobs.append(TokenLogprobs(token_ids[-1], drawn_logprob(history, token_ids[-1]), 1, *top))
            if row.fed[end + place : end + place + 1] != token_ids[-1:]:
                break
        row.tokens = row.tokens + token_ids
        if plan.num_drafts:  # the state after a rejected token is discarded
            row.known = row.known[: end + len(token_ids) - 1]
        return RowResult(
            row=plan.row,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(plan, row, end),
            embedding=self._embedding(row, end),
        )

    def _draw(self, plan: RowPlan, row: SimulatedRow, history: int, output_index: int) -> int:
        token = drawn(row.new.seed, output_index, history)
        held_back = output_index + 1 < row.new.params.min_tokens and token in row.new.stop_token_ids
        return 1 + EOS if held_back else token

    def _prompt_logprobs(self, plan: RowPlan, row: SimulatedRow, end: int) -> list[TokenLogprobs] | None:
        if plan.num_prompt_logprobs is None:
            return None
        prompt = row.new.prompt_token_ids
        fed = range(plan.start, min(end, len(prompt) - 1 - plan.num_dropped))
        return [scored(row.known[position], prompt[position + 1 + plan.num_dropped]) for position in fed]

    def _embedding(self, row: SimulatedRow, end: int) -> list[float] | None:
        if row.new.pooling is None or end < len(row.tokens):
            return None
        if row.new.pooling.kind != "last":
            assert row.num_fed == len(row.tokens), "pooling needs every position"
        return [float(row.known[end - 1] % 1000)]


def own_end_of(plan: RowPlan) -> int:
    """Return where the sequence's own tokens end and drafts begin."""
    return plan.start + len(plan.token_ids) - plan.num_drafts


def scored(history: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -float(mix(history, token) % 97), 1, [], [])


def expected_prompt_logprobs(request: Request) -> list[TokenLogprobs]:
    prompt = request.prompt_token_ids
    befores = (in_sight(prompt[:position], request.shift) for position in range(1, len(prompt)))
    return [scored(histories(before, [])[-1], token) for before, token in zip(befores, prompt[1:], strict=True)]
