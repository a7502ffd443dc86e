"""The runner on a GPU: the host works on step k while the device is already at step k + 1.

Most rows of a server decode: next step they will feed the token they draw in this one. So as soon as a step is on the
stream, the runner starts the next one for all its decoding rows, with tokens that only the device knows yet. When the
scheduler's next plan arrives, rows that are in it as expected find their token computed or on its way; a row that has
ended meanwhile was computed once in vain. Prompts depend on no drawn token: the scheduler is asked for those of the
next step (`plan_ahead`), and they are started too, before this step is waited for. Everything else runs on its own:

    stream:   | rows A, step k | prompts, step k | rows A + those prompts, step k+1 (ahead) | prompts, step k+1 | ...
    host:       plan k ────────► start both of k+1 ─► wait for k ─► apply k, emit, plan k+1 ──────►

What a row computed in vain wrote lies behind the end of its sequence: no full block is ever touched, and whoever gets
the block writes it first, later on the same stream.

Tokens are drawn on the device, by every parameter that `device_draws` knows. Rows that need more (grammars, logprobs,
vectors, rare parameters) go through the plain runner, with the host in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from tokenmill.guided.masks import StepMasks
from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import Model
from tokenmill.runner.decode_graphs import DecodeGraphs, DecodeInputs, Kind, best_tokens
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.runner.inflight import NO_PREFILL, InflightDecode, InflightPrefill, PendingTokens
from tokenmill.runner.inputs import build_batch
from tokenmill.runner.runner import NOT_FINITE, ModelRunner, RowSampler, drawn_result
from tokenmill.runner.sliced_sampler import SlicedSampler
from tokenmill.runner.warmup import WarmUp
from tokenmill.sampling.steps import steps_used
from tokenmill.types import RowInit, RowPlan, RowResult, StepPlan, StepResult

NO_LIMIT = 1 << 62
NONE_LEFT = -2  # drawn in place of a token
NOTHING_LEFT = "no token is left to draw: banned_token_ids and min_tokens together exclude every one"


def nothing_ahead() -> StepPlan | None:
    return None


class CudaRunner:
    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        sampler: RowSampler,
        max_rows: int,
        max_context: int,
        plan_ahead: Callable[[], StepPlan | None] = nothing_ahead,
        *,
        runs_ahead: bool = True,
    ) -> None:
        """`plan_ahead`: rows of the next step that can be computed behind this one; the next plan repeats them."""
        # One block more than the longest context has: where the scheduler looks ahead.
        in_slices = SlicedSampler(sampler, model.vocab_size)
        self._plain = ModelRunner(model, storage, in_slices, max_rows, max_context + storage.block_size)
        self._model = model
        self._storage = storage
        self._rows = self._plain.rows
        self._draws = DeviceSampler(model.vocab_size, max_rows, storage.device)
        self._kinds: list[Kind] = ["hidden"] * max_rows  # how each row's tokens are chosen
        self._max_outputs = [0] * max_rows  # tokens each row draws at most
        self._held = [0] * max_rows  # blocks in each row's tables
        self._dropped = [0] * max_rows  # tokens that went when the row's context shifted
        self._max_context = max_context
        self._graphs = DecodeGraphs(model, storage, self._draws, max_rows, self._rows.tables.shape[2], max_context)
        self._runs_ahead = runs_ahead
        self._ahead: InflightDecode | None = None
        self._plan_ahead = plan_ahead
        self._early = NO_PREFILL
        self._warm_up = WarmUp(model, storage, self._graphs, max_rows, max_context)
        self._preparations: Iterator[Callable[[], object]] = iter(())

    @torch.inference_mode()
    def run(self, plan: StepPlan, masks: StepMasks | None = None) -> StepResult:
        began = time.perf_counter()
        early, self._early = self._early, NO_PREFILL
        self._apply_changes(plan, [row for row in plan.rows if not early.knows(row)])
        expected, begun, fresh, other = self._sort(plan.rows, early)
        waited = [(self._ahead.drawing, expected)] if self._ahead is not None and expected else []
        if early.drawing is not None and begun:
            waited.append((early.drawing, begun))
        if fresh:
            waited.append((self._start(fresh), fresh))
        found = {row.row: row for row in self._run_others(other, masks)} if other else {}
        if self._runs_ahead:
            self._ahead = self._start_ahead([*expected, *begun, *fresh])
            self._early = self._start_early(self._plan_ahead())
        for drawing, plans in waited:
            tokens = drawing.wait()
            found |= {row.row: _result(row, tokens, drawing.lines) for row in plans}
        return StepResult(rows=[found[row.row] for row in plan.rows], step_s=time.perf_counter() - began)

    @property
    def model(self) -> Model:
        return self._model

    @property
    def storage(self) -> KVStorage:
        return self._storage

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        """Takes all the memory that steps will ever take, `step_bytes` for what is planned. Nothing may be running yet.
        `while_compiling` is called while kernels are compiled."""
        self.compile_first(token_budget, while_compiling)
        self.hold(step_bytes)
        self.run_widest_step(token_budget)
        self.capture_largest()

    def compile_first(self, token_budget: int, while_compiling: Callable[[], object]) -> None:
        self._warm_up.compile_first(token_budget, while_compiling)

    def hold(self, num_bytes: int) -> None:
        """Steps with rarer wishes (logits that the host draws from, prompts that are scored) take more than the widest
        one without. Torch keeps what is freed here and cuts it up for them, so nobody else can take it meanwhile."""
        torch.empty(num_bytes, dtype=torch.uint8, device=self._storage.device)

    def run_widest_step(self, token_budget: int) -> None:
        self._warm_up.run_widest(token_budget)
        self._preparations = self._warm_up.preparations(token_budget)

    def capture_largest(self) -> None:
        self._graphs.capture_largest()

    def prepare(self) -> None:
        """Spends a few seconds now that would otherwise be spent on the first batches of each size."""
        while self.next_idle_task():
            pass

    def next_idle_task(self) -> bool:
        """The same a moment at a time, for whoever has one to spare; False: nothing is left."""
        prepare = next(self._preparations, None)
        if prepare is not None:
            prepare()
        return prepare is not None

    # ── what the plan changes ──────────────────────────────────────────────────────────────────────────

    def _apply_changes(self, plan: StepPlan, rows: list[RowPlan]) -> None:
        """`rows`: those of the plan that are new to the runner"""
        expected = self._ahead.positions if self._ahead is not None else {}
        for freed in plan.freed_rows:
            expected.pop(freed, None)
        for new in plan.new_rows:
            expected.pop(new.row, None)
            self._kinds[new.row] = self._kind_of(new)
            self._held[new.row] = self._dropped[new.row] = 0
            self._max_outputs[new.row] = new.params.max_tokens or NO_LIMIT
        self._draws.take([new for new in plan.new_rows if self._kinds[new.row] != "hidden"])
        changes: list[tuple[int, int, int, list[int]]] = []
        for row in rows:
            if row.num_dropped != self._dropped[row.row]:  # all its blocks are others
                self._held[row.row], self._dropped[row.row] = 0, row.num_dropped
            for update in row.table_updates:
                changes.append((update.group, row.row, update.start, update.blocks))
                self._held[row.row] = max(self._held[row.row], update.start + len(update.blocks))
                position = expected.get(row.row)
                if position is not None and self._moves(row.row, position, update.start, len(update.blocks)):
                    expected.pop(row.row)
        self._plain.apply_changes(plan, rows)
        self._graphs.rows.change(changes)

    def _moves(self, row: int, position: int, start: int, count: int) -> bool:
        """The block that the token ahead was written to gets another number."""
        return start <= position // self._storage.block_size < start + count

    # ── who computes what ──────────────────────────────────────────────────────────────────────────────

    def _sort(self, plans: Sequence[RowPlan], early: InflightPrefill) -> tuple[list[RowPlan], ...]:
        """Rows that were computed ahead; prompts that were started early; rows to compute now; rows for the plain
        runner."""
        expected: list[RowPlan] = []
        begun: list[RowPlan] = []
        fresh: list[RowPlan] = []
        other: list[RowPlan] = []
        positions = self._ahead.positions if self._ahead is not None else {}
        for plan in plans:
            if positions.get(plan.row) == plan.start and len(plan.token_ids) == 1:
                expected.append(plan)
            elif early.has_started(plan):
                begun.append(plan)
            elif self._is_simple(plan):
                fresh.append(plan)
            else:
                other.append(plan)
        return expected, begun, fresh, other

    def _is_simple(self, plan: RowPlan) -> bool:
        is_asked = plan.num_logprobs is not None or plan.num_prompt_logprobs is not None
        return self._kinds[plan.row] != "hidden" and not is_asked

    def _kind_of(self, new: RowInit) -> Kind:
        if not self._draws.can_draw(new):
            return "hidden"
        return "best" if new.params.is_greedy and not steps_used(new.params) else "draw"

    def _kind(self, rows: Sequence[int]) -> Kind:
        """Of a step of these rows: one that draws makes it a step of draws, in which others take the best."""
        return "draw" if any(self._kinds[row] == "draw" for row in rows) else "best"

    def _run_others(self, plans: list[RowPlan], masks: StepMasks | None) -> list[RowResult]:
        """With the host in between. Rows that feed one token still go through a graph, up to the logits."""
        if not all(len(plan.token_ids) == 1 and self._only_draws(plan) for plan in plans):
            return self._plain.run_rows(plans, masks)
        hidden = self._graphs.hidden(_fed(plans))
        drawn = self._plain.sampler.sample(self._model.logits(hidden), plans, masks)
        return [drawn_result(plan.row, [one], None) for plan, one in zip(plans, drawn, strict=True)]

    def _only_draws(self, plan: RowPlan) -> bool:
        return plan.sample and plan.num_prompt_logprobs is None and self._rows[plan.row].pooler is None

    # ── onto the stream ────────────────────────────────────────────────────────────────────────────────

    def _start(self, plans: list[RowPlan]) -> PendingTokens:
        if all(len(plan.token_ids) == 1 and plan.sample for plan in plans):
            return self._start_graph(_fed(plans))
        # Rows with one query come first and whole long prompts last: each kind has a kernel of its own.
        plans = sorted(plans, key=lambda plan: (len(plan.token_ids) > 1, plan.start == 0, len(plan.token_ids)))
        drawing = [plan for plan in plans if plan.sample]
        wanted = [[len(plan.token_ids) - 1] if plan.sample else [] for plan in plans]
        batch = build_batch(plans, wanted, self._rows.tables, self._storage.block_size, self._storage.device)
        hidden = self._model.forward(batch, self._storage)
        if not drawing:
            return self._on_its_way(hidden.new_empty(0, dtype=torch.int64), [])
        return self._on_its_way(self._picked(hidden, drawing), [plan.row for plan in drawing])

    def _picked(self, hidden: torch.Tensor, plans: list[RowPlan]) -> torch.Tensor:
        """Tokens [R] for the rows of `plans`, which become their newest."""
        rows = [plan.row for plan in plans]
        if self._kind(rows) == "best":
            drawn = best_tokens(self._model, hidden, "eager")
            self._graphs.newest.index_copy_(0, self._to_device(rows, torch.int64), drawn)
            return drawn
        indices = [plan.output_index for plan in plans]
        uniforms = self._to_device(self._draws.uniforms(rows, indices), torch.float64)
        seats, places = self._to_device(rows, torch.int32), self._to_device(indices, torch.int32)
        self._draws.count_fed(seats, places, self._to_device([plan.token_ids[-1] for plan in plans], torch.int32))
        return self._draws.draw(self._model.logits(hidden), seats, places, uniforms, self._graphs.newest)

    def _to_device(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(self._storage.device, non_blocking=True)

    def _start_ahead(self, plans: list[RowPlan]) -> InflightDecode | None:
        """The step after this one, for rows that draw now and have room for one more token."""
        ready = [
            (plan.row, end, plan.output_index + 1)
            for plan in plans
            if plan.sample
            and plan.output_index + 1 < self._max_outputs[plan.row]
            and self._has_room(plan.row, end := plan.start + len(plan.token_ids))
        ]
        if not ready:
            return None
        rows, ends, indices = (list(part) for part in zip(*ready, strict=True))
        return InflightDecode(
            self._start_graph(DecodeInputs(rows, ends, None, indices)), dict(zip(rows, ends, strict=True))
        )

    def _start_early(self, plan: StepPlan | None) -> InflightPrefill:
        if plan is None:
            return NO_PREFILL
        self._apply_changes(plan, plan.rows)
        simple = [row for row in plan.rows if self._is_simple(row)]
        drawing = self._start(simple) if simple else None
        return InflightPrefill({row.row: row for row in plan.rows}, {row.row: row for row in simple}, drawing)

    def _has_room(self, row: int, position: int) -> bool:
        return position < self._max_context and self._held[row] > position // self._storage.block_size

    def _start_graph(self, fed: DecodeInputs) -> PendingTokens:
        return self._graphs.start(fed, self._kind(fed.rows))

    def _on_its_way(self, drawn: torch.Tensor, rows: list[int]) -> PendingTokens:
        tokens = torch.empty(len(drawn), dtype=torch.int64, pin_memory=True)
        tokens.copy_(drawn, non_blocking=True)
        is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        is_there.record()
        return PendingTokens({row: line for line, row in enumerate(rows)}, tokens, is_there)


def _fed(plans: list[RowPlan]) -> DecodeInputs:
    """Of rows that feed one token each."""
    return DecodeInputs(
        rows=[plan.row for plan in plans],
        positions=[plan.start for plan in plans],
        tokens=[plan.token_ids[0] for plan in plans],
        indices=[plan.output_index for plan in plans],
    )


def _result(plan: RowPlan, tokens: list[int], lines: dict[int, int]) -> RowResult:
    if not plan.sample:
        return RowResult(row=plan.row)
    token = tokens[lines[plan.row]]
    if token < 0:
        return RowResult(row=plan.row, error=NOTHING_LEFT if token == NONE_LEFT else NOT_FINITE)
    return RowResult(row=plan.row, token_ids=[token])
