"""The runner on a CPU: apply a plan's changes, build the batch, run the model, then compute each row's result.

    launch(plan) -> ticket   accept the step; a CPU computes it when its result is collected
    draw(ticket, masks)      set the tokens that rows with grammars may sample, if there are such rows
    collect(ticket) -> result

A row's result is its next token, logprobs of its prompt, or one vector for the whole prompt. The model returns only the
hidden states needed for these. Values that are not finite become an `error` of their row.

Where all rows only draw, which is nearly always, a model that can (`DirectModel`) is given the rows as they are: a
step reads more than the caches hold, and what a library call costs afterwards is fetching its code again. A few dozen
calls of numpy and torch on a few numbers each took ten times as long as planning and applying the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.guided.masks import StepMasks
from tokenmill.kv.storage import KVStorage
from tokenmill.lora.adapter import Adapter
from tokenmill.models.mtp_head import KeptStates
from tokenmill.models.pooling import Pooler
from tokenmill.models.protocol import DirectModel, Model
from tokenmill.ops.batch import DrawParams, ForwardBatch, StepRows
from tokenmill.runner.inputs import build_batch
from tokenmill.runner.memory import MAX_HOST_LOGITS
from tokenmill.sampling.logprobs import prompt_logprobs
from tokenmill.sampling.samples import HeadOutput, ModelSampled, Sample, greedy_from_argmax
from tokenmill.types import PENDING, BlockTableUpdate, RowInit, RowPlan, RowResult, StepPlan, StepResult, TokenLogprobs

NOT_FINITE = "the model computed NaN or infinite values for this sequence (in float16: try --dtype bfloat16)"


class RowSampler(Protocol):
    """The methods of a sampler that the runner uses (`sampling/sampler.py`)."""

    def add_row(self, new_row: RowInit) -> None: ...

    def free_row(self, row: int) -> None: ...

    def observe(self, rows: Sequence[RowPlan]) -> None: ...

    def needs_logits(self, rows: Sequence[RowPlan]) -> bool: ...

    def plain_draws(self, rows: Sequence[RowPlan]) -> DrawParams | None: ...

    def sample(self, logits: HeadOutput, rows: list[RowPlan], masks: StepMasks | None = None) -> list[Sample]: ...

    def verify(self, logits: HeadOutput, rows: list[RowPlan], masks: StepMasks | None = None) -> list[list[Sample]]: ...


@dataclass(frozen=True)
class Row:
    """The state of a live sequence that the runner keeps between steps."""

    prompt_token_ids: list[int]
    pooler: Pooler | None  # set if the result is a vector, not tokens
    adapter_slot: int = 0
    part: int = 0


class RowTable:
    """The runner's rows and their block tables, int32 [groups, max_rows, max_blocks]. Steps send changes only; entries
    beyond a row's context are outdated, and no query reads them."""

    def __init__(self, num_groups: int, max_rows: int, max_blocks: int) -> None:
        self.tables: NDArray[np.int32] = np.zeros((num_groups, max_rows, max_blocks), np.int32)
        self._live: dict[int, Row] = {}
        self._num_adapted = 0  # rows with an adapter

    def __contains__(self, row: int) -> bool:
        return row in self._live

    def __getitem__(self, row: int) -> Row:
        return self._live[row]

    def add(self, new: RowInit) -> None:
        """Initialise a row, or initialise it again for another sequence (a fork, or a resumed one)."""
        pooler = Pooler(new.pooling, len(new.prompt_token_ids)) if new.pooling else None
        if new.row in self._live:
            self.free(new.row)
        self._live[new.row] = Row(new.prompt_token_ids, pooler, new.adapter_slot, new.part)
        self._num_adapted += new.adapter_slot != 0

    def free(self, row: int) -> None:
        self._num_adapted -= self._live.pop(row).adapter_slot != 0

    def adapters(self, plans: Sequence[RowPlan]) -> list[int] | None:
        """Return the slots of these rows' adapters, 0 for none; None if no row has an adapter."""
        if not self._num_adapted:
            return None
        slots = [self._live[plan.row].adapter_slot for plan in plans]
        return slots if any(slots) else None

    def update_tables(self, row: int, updates: Sequence[BlockTableUpdate]) -> None:
        for update in updates:
            self.tables[update.group, row, update.start : update.start + len(update.blocks)] = update.blocks


@dataclass(frozen=True)
class RowTask:
    """One row of a step and its required hidden states; `wanted` are offsets into its input tokens."""

    plan: RowPlan
    pooler: Pooler | None
    targets: list[int]  # prompt tokens to score, predicted by the first input tokens
    wanted: Sequence[int]


@dataclass(frozen=True)
class RowsForward:
    """Rows whose forward pass was started; sampling, scoring and pooling follow."""

    tasks: list[RowTask]
    hidden: torch.Tensor  # [L, H]: the wanted states of all tasks, one task after another


class ModelRunner:
    """Computes each step when it is collected, so one step in flight is enough; several are accepted, in order."""

    depth = 1

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        sampler: RowSampler,
        max_rows: int,
        max_context: int,
        part: int | None = None,
    ) -> None:
        """`part`: this rank's part of the cache, with data-parallel attention."""
        self.model = model
        self._part = part
        self.storage = storage
        self.sampler = sampler
        max_blocks = -(-max_context // storage.block_size)
        self.rows = RowTable(len(storage.layout.groups), max_rows, max_blocks)
        self._launched: dict[int, StepPlan] = {}
        self._masks: dict[int, StepMasks] = {}  # by ticket
        self._newest: dict[int, int] = {}  # the token that each row sampled last
        self.adapters: Mapping[str, Adapter] = {}  # adapters that plans may load, by digest
        self.kept_states: KeptStates | None = None  # set if a head of the model needs the hidden states of all tokens

    def continues(self, new: RowInit) -> bool:
        """Return False: on a CPU nothing is gained by using a token before the host has seen it."""
        return False

    def launch(self, plan: StepPlan) -> int:
        self._launched[plan.step] = plan
        return plan.step

    def draw(self, ticket: int, masks: StepMasks) -> None:
        self._masks[ticket] = masks

    def collect(self, ticket: int) -> StepResult:
        """Compute a step. Steps are collected in the order in which they were launched."""
        began = time.perf_counter()
        plan, masks = self._launched.pop(ticket), self._masks.pop(ticket, None)
        fed = [self._filled(row) if row.token_ids[0] == PENDING else row for row in plan.rows]
        self.apply_changes(plan)
        self.sampler.observe(fed)
        rows = self.run_rows(fed, masks) if fed else []
        for row in rows:
            if row.token_ids:
                self._newest[row.row] = row.token_ids[-1]
        return StepResult(step=ticket, rows=rows, step_s=time.perf_counter() - began)

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        """Do nothing: a step's memory is allocated on demand, and no kernels are compiled."""

    def next_idle_task(self) -> bool:
        return False

    def _filled(self, plan: RowPlan) -> RowPlan:
        """Return the row with the token that it sampled last as its input. If that failed, the row's result is void, so
        any token will do."""
        return msgspec.structs.replace(plan, token_ids=[self._newest.get(plan.row, 0)])

    def apply_changes(self, plan: StepPlan) -> None:
        """Apply a plan's changes of rows, adapters, blocks and block tables."""
        for row in plan.freed_rows:
            if row not in self.rows:  # the step that should have added it failed
                continue
            if self.rows[row].pooler is None:
                self.sampler.free_row(row)
            self.rows.free(row)
            if self.kept_states is not None:
                self.kept_states.drop(row)
        for slot, digest in plan.adapter_loads:
            slots = self.model.adapter_slots
            assert slots is not None, "a model without slots gets no requests with adapters"
            slots.put(slot, self.adapters[digest].matrices)
        for new in plan.new_rows:
            self.rows.add(new)
            if self.kept_states is not None:
                self.kept_states.drop(new.row)
            if new.pooling is None:
                self.sampler.add_row(new)
        if plan.copies:
            self.storage.copy_blocks(self._own_copies(plan.copies))
        for row_plan in plan.rows:
            if row_plan.table_updates:
                self.rows.update_tables(row_plan.row, row_plan.table_updates)

    def run_rows(self, plans: Sequence[RowPlan], masks: StepMasks | None = None) -> list[RowResult]:
        direct = self.model.direct
        if direct is not None and self.kept_states is None and all(self._only_draws(plan) for plan in plans):
            return self._run_direct(direct, plans, masks)
        with torch.inference_mode():
            return self.finish_rows(self.start_rows(plans), masks)

    # ── rows that only sample ──────────────────────────────────────────────────────────────────────────

    def _only_draws(self, plan: RowPlan) -> bool:
        """Tell whether a row needs only its next token, or nothing (a chunk of a prompt)."""
        return plan.num_prompt_logprobs is None and self.rows[plan.row].pooler is None

    def _run_direct(self, model: DirectModel, plans: Sequence[RowPlan], masks: StepMasks | None) -> list[RowResult]:
        rows = StepRows(
            rows=[plan.row for plan in plans],
            starts=[plan.start for plan in plans],
            token_ids=[plan.token_ids for plan in plans],
            num_outputs=[1 + plan.num_drafts if plan.sample else 0 for plan in plans],
            tables=self.rows.tables,
            block_size=self.storage.block_size,
            adapters=self.rows.adapters(plans) or (),
            owners=self._owners(plans) or (),
        )
        drawing = [plan for plan in plans if plan.sample]
        head = self._direct_head(model, rows, drawing)
        drawn = iter(self.sampler.verify(head, drawing, masks))
        return [drawn_result(plan.row, next(drawn) if plan.sample else (), None) for plan in plans]

    def _direct_head(self, model: DirectModel, rows: StepRows, drawing: Sequence[RowPlan]) -> HeadOutput:
        if not self.sampler.needs_logits(drawing):
            return ModelSampled(model.greedy_next(rows, self.storage))
        params = self.sampler.plain_draws(drawing)
        if params is not None:
            return ModelSampled(model.draw_next(rows, params, self.storage))
        return model.logits_next(rows, self.storage)

    # ── any rows ───────────────────────────────────────────────────────────────────────────────────────

    def start_rows(self, plans: Sequence[RowPlan]) -> RowsForward:
        """Start the forward pass of rows with any kinds of results."""
        tasks, batch = self.prepare_rows(plans)
        return RowsForward(tasks, self.model.forward(batch, self.storage))

    def prepare_rows(self, plans: Sequence[RowPlan]) -> tuple[list[RowTask], ForwardBatch]:
        """Return the tasks of the rows, and the inputs of their forward pass."""
        tasks = [self._task(plan) for plan in plans]
        wanted = [task.wanted for task in tasks]
        adapters = self.rows.adapters(plans)
        tables, block_size = self.rows.tables, self.storage.block_size
        owners = self._owners(plans)
        return tasks, build_batch(plans, wanted, tables, block_size, self.storage.device, adapters, owners)

    def _owners(self, plans: Sequence[RowPlan]) -> list[int] | None:
        """Return the ranks with these rows' contexts; None if there is one cache."""
        return None if self._part is None else [self.rows[plan.row].part for plan in plans]

    def _own_copies(self, copies: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Return the block copies that concern this rank, in its own numbering."""
        if self._part is None:
            return copies
        first, number = 1 + self._part * (self.storage.num_blocks - 1), self.storage.num_blocks - 1
        own = (pair for pair in copies if first <= pair[0] < first + number)
        return [(source - first + 1, target - first + 1) for source, target in own]

    def finish_rows(self, started: RowsForward, masks: StepMasks | None) -> list[RowResult]:
        """Sample, score and pool."""
        parts = torch.split(started.hidden, [len(task.wanted) for task in started.tasks])
        if self.kept_states is not None:
            for task, part in zip(started.tasks, parts, strict=True):
                if task.pooler is None:
                    self.kept_states.keep(task.plan.row, task.plan.sequence_position, part)
        drawn = self._draw(started.tasks, parts, masks)
        return [self._result(task, part, drawn) for task, part in zip(started.tasks, parts, strict=True)]

    def _task(self, plan: RowPlan) -> RowTask:
        row = self.rows[plan.row]
        fed = len(plan.token_ids)
        if row.pooler is not None:
            return RowTask(plan, row.pooler, [], row.pooler.needed_tokens(plan.start, fed))
        targets = [] if plan.num_prompt_logprobs is None else scored_tokens(plan, row.prompt_token_ids)
        if self.kept_states is not None:
            return RowTask(plan, None, targets, range(fed))
        # Positions that sample never score the prompt: the token after them is not known yet.
        drawing = range(fed - 1 - plan.num_drafts, fed) if plan.sample else ()
        return RowTask(plan, None, targets, [*range(len(targets)), *drawing])

    def _draw(
        self, tasks: Sequence[RowTask], parts: Sequence[torch.Tensor], masks: StepMasks | None
    ) -> dict[int, list[Sample]]:
        """Return the sampled tokens by row."""
        drawing = [
            (task.plan, part[-1 - task.plan.num_drafts :])
            for task, part in zip(tasks, parts, strict=True)
            if task.plan.sample
        ]
        drawing = [(plan, state) for plan, state in drawing if self.rows[plan.row].pooler is None]
        if not drawing:
            return {}
        plans = [plan for plan, _ in drawing]
        logits = self._head(torch.cat([state for _, state in drawing]), plans)
        return {plan.row: drawn for plan, drawn in zip(plans, self.sampler.verify(logits, plans, masks), strict=True)}

    def _head(self, hidden: torch.Tensor, plans: Sequence[RowPlan]) -> HeadOutput:
        best_logits, slots = self.model.best_logits, self.rows.adapters(plans)
        if best_logits is None or self.sampler.needs_logits(plans):
            return self.model.logits(hidden) if slots is None else self.adapted_logits(hidden, plans, slots)
        if slots is None:
            return greedy_from_argmax(*best_logits(hidden))
        return greedy_from_argmax(*best_logits(hidden, adapters=self._line_slots(plans, slots)))

    def adapted_logits(self, hidden: torch.Tensor, plans: Sequence[RowPlan], slots: list[int]) -> torch.Tensor:
        """Compute the logits of rows of which some have adapters."""
        return self.model.logits(hidden, adapters=self._line_slots(plans, slots))

    def _line_slots(self, plans: Sequence[RowPlan], slots: list[int]) -> torch.Tensor:
        """Return the adapter slots, one for each line of logits, including those of drafts."""
        lines = [slot for slot, plan in zip(slots, plans, strict=True) for _ in range(1 + plan.num_drafts)]
        return torch.tensor(lines, dtype=torch.int32).to(self.storage.device)

    def _result(self, task: RowTask, hidden: torch.Tensor, drawn: dict[int, list[Sample]]) -> RowResult:
        if task.pooler is not None:
            return _pooled(task.plan, task.pooler, hidden)
        scores = self._scores(task, hidden)
        if task.targets and scores is None:
            return RowResult(row=task.plan.row, error=NOT_FINITE)
        return drawn_result(task.plan.row, drawn.get(task.plan.row, []), scores)

    def _scores(self, task: RowTask, hidden: torch.Tensor) -> list[TokenLogprobs] | None:
        """Return the logprobs of the task's targets; None if none are requested, or the logits are not finite."""
        num = task.plan.num_prompt_logprobs
        if num is None:
            return None
        scoring = hidden[: len(task.targets)]
        return score_prompt(scoring, task.targets, num, self._head_of(task.plan.row), self.model.vocab_size)

    def _head_of(self, row: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the output head for the hidden states of one row."""
        slot = self.rows[row].adapter_slot
        if not slot:
            return self.model.logits
        device = self.storage.device
        return lambda states: self.model.logits(
            states, adapters=torch.full((len(states),), slot, dtype=torch.int32, device=device)
        )


def drawn_result(row: int, drawn: Sequence[Sample], scores: list[TokenLogprobs] | None) -> RowResult:
    if not drawn:
        return RowResult(row=row, prompt_logprobs=scores)
    if drawn[0].error is not None:
        return RowResult(row=row, error=drawn[0].error)
    logprobs = [one.logprobs for one in drawn if one.logprobs is not None]
    return RowResult(
        row=row,
        token_ids=[one.token_id for one in drawn],
        logprobs=logprobs or None,
        prompt_logprobs=scores,
        mirostat_mu=drawn[-1].mirostat_mu,
    )


def _pooled(plan: RowPlan, pooler: Pooler, hidden: torch.Tensor) -> RowResult:
    pooler.add(hidden)
    if plan.start + len(plan.token_ids) < pooler.prompt_len:
        return RowResult(row=plan.row)
    vector = pooler.vector()
    if not bool(vector.isfinite().all()):
        return RowResult(row=plan.row, error=NOT_FINITE)
    return RowResult(row=plan.row, embedding=vector.tolist())


# ── prompt logprobs ────────────────────────────────────────────────────────────────────────────────────


def scored_tokens(plan: RowPlan, prompt: list[int]) -> list[int]:
    """Return the prompt tokens that this step's positions predict; the k-th input token predicts the k-th of them.

        prompt    t0 t1 t2 t3 t4 t5        chunk [t2 t3 t4] scores t3 t4 t5; chunk [t5] scores nothing

    If the context has shifted, the kept tokens at its start have other successors; these are already scored, and the
    scheduler drops repeated scores.
    """
    return prompt[plan.sequence_position + 1 : plan.sequence_position + 1 + len(plan.token_ids)]


def score_prompt(
    hidden: torch.Tensor, targets: list[int], num: int, logits: Callable[[torch.Tensor], torch.Tensor], vocab: int
) -> list[TokenLogprobs] | None:
    """Return the logprobs of n prompt tokens from the hidden states [n, H] at the positions before them; None if the
    logits are not finite."""
    size = max(1, MAX_HOST_LOGITS // vocab)  # at most 64 MiB of logits at a time, for prompts of any length
    scores: list[TokenLogprobs] = []
    for first in range(0, len(targets), size):
        part = logits(hidden[first : first + size])
        if not bool(part.amax(-1).isfinite().all()):
            return None
        scores += prompt_logprobs(part, targets[first : first + size], num)
    return scores


# ── large vocabularies ─────────────────────────────────────────────────────────────────────────────────


class SlicedSampler:
    """A sampler that works on slices of the logits, so that its copies stay within the planned memory."""

    def __init__(self, sampler: RowSampler, vocab_size: int) -> None:
        self._sampler = sampler
        self._num_rows = max(1, MAX_HOST_LOGITS // vocab_size)

    def add_row(self, new_row: RowInit) -> None:
        self._sampler.add_row(new_row)

    def free_row(self, row: int) -> None:
        self._sampler.free_row(row)

    def observe(self, rows: Sequence[RowPlan]) -> None:
        self._sampler.observe(rows)

    def needs_logits(self, rows: Sequence[RowPlan]) -> bool:
        return self._sampler.needs_logits(rows)

    def plain_draws(self, rows: Sequence[RowPlan]) -> DrawParams | None:
        return self._sampler.plain_draws(rows)

    def sample(self, logits: HeadOutput, rows: list[RowPlan], masks: StepMasks | None = None) -> list[Sample]:
        """Sample slice by slice: rows are sampled independently, so the slices do not change the result."""
        drawn: list[Sample] = []
        for first in range(0, len(rows), self._num_rows):
            part = slice(first, first + self._num_rows)
            drawn += self._sampler.sample(logits[part], rows[part], masks)
        return drawn

    def verify(self, logits: HeadOutput, rows: list[RowPlan], masks: StepMasks | None = None) -> list[list[Sample]]:
        """Verify slice by slice: all lines of a row, of which it may have several, are in one slice."""
        drawn: list[list[Sample]] = []
        line = 0
        while len(drawn) < len(rows):
            part = self._next_slice(rows[len(drawn) :])
            num_lines = sum(1 + plan.num_drafts for plan in part)
            drawn += self._sampler.verify(logits[line : line + num_lines], part, masks)
            line += num_lines
        return drawn

    def _next_slice(self, rows: list[RowPlan]) -> list[RowPlan]:
        ends = accumulate(1 + plan.num_drafts for plan in rows)
        return rows[: max(1, sum(end <= self._num_rows for end in ends))]
