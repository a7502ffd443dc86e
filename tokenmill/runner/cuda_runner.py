"""The runner on a GPU: steps are put on the stream and collected later, so that the device never waits for the host.

    launch    enqueue the forward pass of a step, and sampling of its rows that are sampled on the device
    draw      enqueue sampling of a step that has rows with grammars, once their masks are known
    collect   wait for the tokens; sample the rows that are sampled on the host

Most rows of a server decode: each step feeds the token that the row sampled in the previous step (PENDING), which only
the device knows when the step is launched. Such rows run in captured graphs. In a step with prompts they are part of
the prompts' forward pass, so that the weights are read once:

    stream:   | decode k | prompts and decode k+1 | decode k+2 | ...
    host:       launch k ─► launch k+1 ─► collect k, apply, output, plan k+2 ─► launch k+2 ─► collect k+1 ...

A row whose sequence turns out to have ended in step k is computed once more in step k+1, and that result is discarded.
What it wrote lies behind the end of its sequence: no full block is ever touched, and the block returns to the pool when
step k+1 is collected.

Rows are sampled on the device if `device_sampler` supports their parameters. A batch that has rows with grammars ends
with hidden states, and all its rows are sampled in `draw`, after its forward pass and before the next one. Rows that
need more (logprobs, embeddings, rare parameters) have their forward pass launched like the others, and are sampled on
the host when the step is collected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from tokenmill.guided.masks import StepMasks
from tokenmill.kv.storage import KVStorage
from tokenmill.lora.adapter import Adapter
from tokenmill.models.protocol import Model
from tokenmill.runner.decode_graphs import DecodeGraphs, DecodeInputs, Kind, PendingTokens, best_tokens
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.runner.inputs import build_batch
from tokenmill.runner.mixed_graphs import mixed_graphs_of
from tokenmill.runner.runner import NOT_FINITE, ModelRunner, RowSampler, RowsForward, SlicedSampler, drawn_result
from tokenmill.runner.warmup import WarmUp
from tokenmill.sampling.steps import steps_used
from tokenmill.types import PENDING, RowInit, RowPlan, RowResult, StepPlan, StepResult

ALL_EXCLUDED = -2  # what the sampling kernel returns if no token may be sampled (`ops/triton/sampling/sample.py`)
ALL_EXCLUDED_ERROR = "no token is left to draw: banned_token_ids and min_tokens together exclude every one"


@dataclass(frozen=True)
class HostDraws:
    """Rows that feed one token each and are sampled on the host."""

    plans: list[RowPlan]
    hidden: torch.Tensor  # [R, H]


@dataclass
class LaunchedStep:
    """A step that is launched and not collected yet."""

    plan: StepPlan
    began: float
    pending: list[tuple[PendingTokens, list[RowPlan]]] = field(default_factory=list)  # sampled on the device
    undrawn: list[tuple[torch.Tensor, list[RowPlan]]] = field(
        default_factory=list
    )  # hidden states of rows not sampled yet
    host: HostDraws | RowsForward | None = None  # rows whose results the host computes
    computed: torch.cuda.Event | None = None  # recorded after the forward pass of those rows
    masks: StepMasks | None = None


class CudaRunner:
    depth = 2  # the device computes one step while the host handles the other

    def __init__(
        self, model: Model, storage: KVStorage, sampler: RowSampler, max_rows: int, max_context: int,
        *, is_stage: bool = False, has_head: bool = True,
    ) -> None:  # fmt: skip
        """`is_stage`: the model has the layers of one pipeline stage; `has_head`: False for a later stage, which
        samples nothing."""
        sliced = SlicedSampler(sampler, model.vocab_size)
        self._host = ModelRunner(model, storage, sliced, max_rows, max_context)
        self._model = model
        self._storage = storage
        self._rows = self._host.rows
        self._sampler = DeviceSampler(model.vocab_size, max_rows, storage.device)
        self._kinds: list[Kind] = ["host"] * max_rows  # how each row's tokens are sampled
        self._is_guided = [False] * max_rows  # rows sampled on the device under a grammar's masks
        self._graphs = DecodeGraphs(model, storage, self._sampler, max_rows, self._rows.tables.shape[2], max_context)
        mixed = None if is_stage else mixed_graphs_of(model, storage, self._graphs, max_rows, max_context)
        self._mixed = mixed
        self._launched: dict[int, LaunchedStep] = {}
        self._warm_up = WarmUp(model, storage, self._graphs, max_rows, max_context, self._mixed, has_head=has_head)
        self._preparations: Iterator[Callable[[], object]] = iter(())
        self._row_slots = [0] * max_rows  # each row's adapter slot, as stored on the device
        self._has_collected_step = False

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._host.adapters

    @adapters.setter
    def adapters(self, adapters: Mapping[str, Adapter]) -> None:
        self._host.adapters = adapters

    def continues(self, new: RowInit) -> bool:
        """Tell whether a row can feed its newest token before the host has seen it: if it is sampled on the device."""
        return self._sampler.can_draw(new)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> int:
        if self._has_collected_step:  # not earlier: compiling would delay the first token
            self._warm_up.compile_rest()
        step = LaunchedStep(plan, time.perf_counter())
        self._apply_changes(plan)
        decode, prefill, host = self._sort(plan.rows)
        if prefill:
            self._launch_prefill(step, decode + prefill)
        elif decode:
            self._launch_decode(step, decode)
        if host:
            step.host = self._launch_host(host)
            step.computed = self._event()
        self._launched[plan.step] = step
        return plan.step

    @torch.inference_mode()
    def draw(self, ticket: int, masks: StepMasks) -> None:
        step = self._launched[ticket]
        step.masks = masks
        if step.undrawn:
            plans = [plan for _, part in step.undrawn for plan in part]
            drawing = [plan for plan in plans if plan.sample]
            drawn = self._drawn(torch.cat([hidden for hidden, _ in step.undrawn]), drawing, masks)
            step.pending.append((self._to_host(drawn, [plan.row for plan in drawing]), plans))

    def guided_rows(self, ticket: int) -> list[int]:
        """Return the rows of a launched step whose masks `draw` reads."""
        plans = [plan for _, part in self._launched[ticket].undrawn for plan in part]
        return [plan.row for plan in plans if plan.sample and self._is_guided[plan.row]]

    @torch.inference_mode()
    def collect(self, ticket: int) -> StepResult:
        step = self._launched.pop(ticket)
        found = {row.row: row for row in self._finish_host(step.host, step.masks)}
        for pending, plans in step.pending:
            tokens = pending.wait()
            found |= {row.row: _result(row, tokens, pending.lines) for row in plans}
        if step.computed is not None:  # a chunk without sampling was not waited for yet, and `step_s` includes it
            step.computed.synchronize()
        rows = [found[row.row] for row in step.plan.rows]
        self._has_collected_step = True
        return StepResult(step=ticket, rows=rows, step_s=time.perf_counter() - step.began)

    @property
    def model(self) -> Model:
        return self._model

    @property
    def storage(self) -> KVStorage:
        return self._storage

    # ── before the first request ───────────────────────────────────────────────────────────────────────

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        """Allocate all the memory that steps will ever use, `step_bytes` of it as planned for the largest step. No
        request may be running yet. `while_compiling` is called while kernels are compiled."""
        self.compile_first(token_budget, while_compiling)
        self.hold(step_bytes)
        self.run_widest_step(token_budget)
        self.capture_largest()

    def compile_first(self, token_budget: int, while_compiling: Callable[[], object]) -> None:
        self._warm_up.compile_first(token_budget, while_compiling)

    def hold(self, num_bytes: int) -> None:
        """Reserve memory for steps that use more than the widest one (logits sampled on the host, scored prompts).
        Torch's allocator keeps the freed memory and splits it for those steps, so no other process can take it."""
        torch.empty(num_bytes, dtype=torch.uint8, device=self._storage.device)

    def run_widest_step(self, token_budget: int) -> None:
        self._warm_up.run_widest(token_budget)
        self._preparations = self._warm_up.preparations(token_budget)

    def capture_largest(self) -> None:
        self._graphs.capture_largest(0 if self._mixed is None else self._mixed.step_bytes())

    def prepare(self) -> None:
        """Run all idle tasks now, for a few seconds, so that the first batches of each size do not pay for them."""
        while self.next_idle_task():
            pass

    def next_idle_task(self) -> bool:
        """Run the next idle task; return False if none is left."""
        prepare = next(self._preparations, None)
        if prepare is not None:
            prepare()
        return prepare is not None

    # ── launch ─────────────────────────────────────────────────────────────────────────────────────────

    def _apply_changes(self, plan: StepPlan) -> None:
        """Apply a plan's changes of rows, blocks and block tables, on the host and on the device."""
        for new in plan.new_rows:
            kind = self._kinds[new.row] = self._kind_of(new)
            self._is_guided[new.row] = kind != "host" and new.params.guided is not None
        self._sampler.take([new for new in plan.new_rows if self._kinds[new.row] != "host"])
        self._host.apply_changes(plan)
        self._note_adapters(plan)
        self._graphs.rows.change(
            [(update.group, row.row, update.start, update.blocks) for row in plan.rows for update in row.table_updates]
        )

    def _note_adapters(self, plan: StepPlan) -> None:
        """Write the adapter slots of new rows to the device."""
        changed = [new for new in plan.new_rows if new.adapter_slot != self._row_slots[new.row]]
        if not changed:
            return
        for new in changed:
            self._row_slots[new.row] = new.adapter_slot
        rows = self._to_device([new.row for new in changed], torch.int64)
        slots = self._to_device([new.adapter_slot for new in changed], torch.int32)
        self._graphs.row_slots.index_copy_(0, rows, slots)

    def _slots(self, plans: Sequence[RowPlan]) -> torch.Tensor | None:
        """Return the adapter slot of each row, or None if no row has an adapter."""
        slots = self._rows.adapters(plans)
        return None if slots is None else self._to_device(slots, torch.int32)

    def _is_adapted(self, plans: Sequence[RowPlan]) -> bool:
        return self._rows.adapters(plans) is not None

    def _kind_of(self, new: RowInit) -> Kind:
        if not self._sampler.can_draw(new):
            return "host"
        return "greedy" if new.params.is_greedy and not steps_used(new.params) else "sample"

    def _kind(self, plans: Sequence[RowPlan]) -> Kind:
        """Return the sampling kind of a batch: "sample" if any row samples, where greedy rows take the most likely
        token."""
        return "sample" if any(self._kinds[plan.row] == "sample" for plan in plans) else "greedy"

    def _sort(self, plans: Sequence[RowPlan]) -> tuple[list[RowPlan], list[RowPlan], list[RowPlan]]:
        """Split rows into those that decode in a graph, prompts, and rows whose results the host computes."""
        decode: list[RowPlan] = []
        prefill: list[RowPlan] = []
        host: list[RowPlan] = []
        for plan in plans:
            is_scored = plan.num_logprobs is not None or plan.num_prompt_logprobs is not None
            if self._kinds[plan.row] == "host" or is_scored:
                host.append(plan)
            elif plan.sample and len(plan.token_ids) == 1:
                decode.append(plan)
            else:
                prefill.append(plan)
        return decode, prefill, host

    def _lacks_masks(self, plans: Sequence[RowPlan]) -> bool:
        return any(plan.sample and self._is_guided[plan.row] for plan in plans)

    def _launch_decode(self, step: LaunchedStep, plans: list[RowPlan]) -> None:
        if self._lacks_masks(plans):
            step.undrawn.append((self._hidden(plans), plans))
        else:
            inputs, is_adapted = decode_inputs(plans), self._is_adapted(plans)
            step.pending.append((self._graphs.start(inputs, self._kind(plans), is_adapted=is_adapted), plans))

    def _hidden(self, plans: list[RowPlan]) -> torch.Tensor:
        """Launch rows that feed one token each; return their hidden states [R, H]. They are a copy: the next batch of
        the same size, which may be launched before they are read, overwrites the graph's own."""
        return self._graphs.hidden(decode_inputs(plans), is_adapted=self._is_adapted(plans)).clone()

    def _launch_prefill(self, step: LaunchedStep, plans: list[RowPlan]) -> None:
        """Launch rows that feed prompts, together with the rows that decode."""
        plans = self._in_kernel_order(plans)
        drawing = [plan for plan in plans if plan.sample]
        hidden = self._states(plans)
        if self._lacks_masks(drawing):
            step.undrawn.append((hidden, plans))
            return
        drawn = self._drawn(hidden, drawing) if drawing else hidden.new_empty(0, dtype=torch.int64)
        step.pending.append((self._to_host(drawn, [plan.row for plan in drawing]), plans))

    def _in_kernel_order(self, plans: list[RowPlan]) -> list[RowPlan]:
        """Sort rows: those with one query first, prompts from position 0 last, because each kind has its own kernel."""
        return sorted(plans, key=lambda plan: (len(plan.token_ids) > 1, plan.start == 0, len(plan.token_ids)))

    def _states(self, plans: list[RowPlan]) -> torch.Tensor:
        """Run the forward pass of a step with prompts; return hidden states [D, H] of the rows that are sampled."""
        tables, adapters = self._rows.tables, self._rows.adapters(plans)
        if self._mixed is not None and adapters is None and self._mixed.takes(plans):
            hidden = self._mixed.hidden(plans)
            drawing = [number for number, plan in enumerate(plans) if plan.sample]
            # A copy: the next step of the same size overwrites the graph's own.
            return hidden.index_select(0, self._to_device(drawing, torch.int64))
        wanted = [[len(plan.token_ids) - 1] if plan.sample else [] for plan in plans]
        batch = build_batch(plans, wanted, tables, self._storage.block_size, self._storage.device, adapters)
        self._fill_pending(batch.token_ids, plans)
        return self._model.forward(batch, self._storage)

    def _fill_pending(self, token_ids: torch.Tensor, plans: Sequence[RowPlan]) -> None:
        """Replace PENDING by the rows' newest tokens. A row whose sampling failed has a negative one; its result is
        discarded, so it may feed any token."""
        starts = accumulate((len(plan.token_ids) for plan in plans), initial=0)
        fed = [(start, plan.row) for start, plan in zip(starts, plans, strict=False) if plan.token_ids[0] == PENDING]
        if fed:
            indices, rows = self._to_device(list(zip(*fed, strict=True)), torch.int64)
            token_ids.index_copy_(0, indices, self._graphs.newest[rows].clamp_min(0))

    def _drawn(self, hidden: torch.Tensor, plans: list[RowPlan], masks: StepMasks | None = None) -> torch.Tensor:
        """Sample a token for each row of `plans`, int64 [R], and store them as the rows' newest."""
        rows = [plan.row for plan in plans]
        if self._kind(plans) == "greedy":
            drawn = best_tokens(self._model, hidden, "eager", self._slots(plans))
            self._graphs.newest.index_copy_(0, self._to_device(rows, torch.int64), drawn)
            return drawn
        indices, last = [plan.output_index for plan in plans], [plan.token_ids[-1] for plan in plans]
        uniforms = self._to_device(self._sampler.uniforms(rows, indices), torch.float64)
        padding = [0] * (-len(plans) % 4)  # each starts at a multiple of 16 bytes, as the kernels assume
        sent = self._to_device([[*one, *padding] for one in (rows, indices, last)], torch.int32)
        row_ids, output_ids, fed = sent[:, : len(plans)]
        if PENDING in last:
            fed = torch.where(fed == PENDING, self._graphs.newest[row_ids].int(), fed)
        self._sampler.count_fed(row_ids, output_ids, fed)
        logits = self._model.logits(hidden, "eager", self._slots(plans))
        if masks is not None:
            self._keep_grammatical(logits, rows, masks)
        return self._sampler.draw(logits, row_ids, output_ids, uniforms, self._graphs.newest)

    def _keep_grammatical(self, logits: torch.Tensor, rows: list[int], masks: StepMasks) -> None:
        """Exclude the tokens that the masks of rows with grammars forbid; modifies logits [R, vocab]."""
        numbers = [number for number, row in enumerate(rows) if self._is_guided[row]]
        guided = [rows[number] for number in numbers]
        self._sampler.keep_allowed(logits, self._to_device(numbers, torch.int32), masks, guided)

    def _launch_host(self, plans: list[RowPlan]) -> HostDraws | RowsForward:
        """Launch rows whose results the host computes. If all only decode, a graph computes their hidden states."""
        self._host.sampler.observe(plans)
        return HostDraws(plans, self._hidden(plans)) if self._draws_only(plans) else self._host.start_rows(plans)

    def _draws_only(self, plans: list[RowPlan]) -> bool:
        return all(len(plan.token_ids) == 1 and self._only_draws(plan) for plan in plans)

    def _only_draws(self, plan: RowPlan) -> bool:
        return plan.sample and plan.num_prompt_logprobs is None and self._rows[plan.row].pooler is None

    def _to_device(self, values: Sequence[float] | Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(self._storage.device, non_blocking=True)

    def _to_host(self, drawn: torch.Tensor, rows: list[int]) -> PendingTokens:
        tokens = torch.empty(len(drawn), dtype=torch.int64, pin_memory=True)
        tokens.copy_(drawn, non_blocking=True)
        return PendingTokens({row: line for line, row in enumerate(rows)}, tokens, self._event())

    def _event(self) -> torch.cuda.Event:
        """Record an event that completes when everything now on the stream is done."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    # ── collect ────────────────────────────────────────────────────────────────────────────────────────

    def _finish_host(self, started: HostDraws | RowsForward | None, masks: StepMasks | None) -> list[RowResult]:
        if started is None:
            return []
        if isinstance(started, RowsForward):
            return self._host.finish_rows(started, masks)
        logits = self._model.logits(started.hidden, "eager", self._slots(started.plans))
        drawn = self._host.sampler.sample(logits, started.plans, masks)
        return [drawn_result(plan.row, [one], None) for plan, one in zip(started.plans, drawn, strict=True)]


def decode_inputs(plans: list[RowPlan]) -> DecodeInputs:
    """Return the inputs of rows that feed one token each."""
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
        return RowResult(row=plan.row, error=ALL_EXCLUDED_ERROR if token == ALL_EXCLUDED else NOT_FINITE)
    return RowResult(row=plan.row, token_ids=[token])
