"""Steps on the stages of a pipeline whose ranks have GPUs: the order of `staged.py`, with the layers of decoding rows
as captured graphs.

    stage 0   launch    its layers (a graph) ─► send stream       collect   receive stream ─► head, sampling ─► tokens
    stage 1   launch    receive stream ─► `stage_input` ─► its layers (a graph) ─► send stream

On the host only `collect` waits for a device, for the tokens. The tensor-parallel ranks of the first stage compute the
head and sample together; a row's newest token reaches all stages with the next plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tokenmill.guided.masks import StepMasks
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.parallel.group import RankGroup
from tokenmill.parallel.stage_link import StageLink
from tokenmill.runner.cuda_runner import CudaRunner, HostDraws, LaunchedStep, decode_inputs
from tokenmill.runner.decode_graphs import STAGE_KINDS
from tokenmill.runner.mirrored import IDLE, LARGEST, LargestStep, decode_largest, encode_largest
from tokenmill.runner.ranked import Followers, reported
from tokenmill.runner.runner import ModelRunner, RowSampler, RowsForward
from tokenmill.runner.staged import PipelineRunner, run_message
from tokenmill.types import RowPlan, StepPlan, StepResult


class StagedCudaRunner(CudaRunner):
    """A rank's part of each step: its stage's layers, and on the first stage also logits and sampling."""

    busy_s = 0.0  # not measured: the host does not know when the device computes

    def __init__(
        self, model: Decoder, storage: KVStorage, sampler: RowSampler, max_rows: int, max_context: int,
        link: StageLink, num_tokens: int,
    ) -> None:  # fmt: skip
        """`num_tokens`: the maximum number of tokens in a step."""
        self._is_first = model.is_first_stage
        if not self._is_first:
            model.reserve_stage_input(max(num_tokens, max_rows))  # before the warm-up makes a copy of the model
        super().__init__(model, storage, sampler, max_rows, max_context, is_stage=True, has_head=self._is_first)
        self._stage = model
        self._link = link
        self._graphs.kinds = STAGE_KINDS

    @property
    def rows(self) -> ModelRunner:
        """The runner that keeps the state of the rows and receives adapters."""
        return self._host

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> int:
        ticket = super().launch(plan)
        if not self._is_first:
            self._launched.pop(ticket)
        return ticket

    @torch.inference_mode()
    def collect(self, ticket: int, masks: StepMasks | None = None) -> StepResult:
        """Wait for the last stage, then compute logits and sample."""
        step = self._launched[ticket]
        for _, plans in step.undrawn:
            hidden, drawing = self._link.receive(), [plan for plan in plans if plan.sample]
            guided = masks if self._lacks_masks(drawing) else None
            drawn = self._drawn(hidden, drawing, guided) if drawing else hidden.new_empty(0, dtype=torch.int64)
            step.pending.append((self._to_host(drawn, [plan.row for plan in drawing]), plans))
        if step.host is not None:
            step.host = replace(step.host, hidden=self._link.receive())
        step.masks = masks
        step.computed = self._event()  # after it, nothing reads this step's streams any more
        return super().collect(ticket)

    # ── forward passes ─────────────────────────────────────────────────────────────────────────────────

    def _passed(self, num_tokens: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Receive from the previous stage, compute this stage's layers, and send the result to the next stage."""
        if not self._is_first:
            self._stage.stage_input[:num_tokens].copy_(self._link.receive())
        stream = compute()
        self._link.send(stream)
        return stream

    def _launch_decode(self, step: LaunchedStep, plans: list[RowPlan]) -> None:
        step.undrawn.append((self._hidden(plans), plans))

    def _launch_prefill(self, step: LaunchedStep, plans: list[RowPlan]) -> None:
        plans = self._in_kernel_order(plans)
        step.undrawn.append((self._states(plans), plans))

    def _hidden(self, plans: list[RowPlan]) -> torch.Tensor:
        is_adapted = self._is_adapted(plans)
        return self._passed(
            len(plans), lambda: self._graphs.hidden(decode_inputs(plans), is_adapted=is_adapted)
        )  # fmt: skip

    def _states(self, plans: list[RowPlan]) -> torch.Tensor:
        own = super()._states
        return self._passed(sum(len(plan.token_ids) for plan in plans), lambda: own(plans))

    def _launch_host(self, plans: list[RowPlan]) -> HostDraws | RowsForward:
        self._host.sampler.observe(plans)
        if self._draws_only(plans):
            return HostDraws(plans, self._hidden(plans))
        started: list[RowsForward] = []

        def compute() -> torch.Tensor:
            started.append(self._host.start_rows(plans))
            return started[0].hidden

        self._passed(sum(len(plan.token_ids) for plan in plans), compute)
        return started[0]


class DevicePipelineRunner(PipelineRunner):
    """Runs steps on all stages; the ranks of all stages warm up at the same time."""

    def __init__(
        self, own: StagedCudaRunner, group: RankGroup, followers: Followers, beside: int, depth: int
    ) -> None:  # fmt: skip
        super().__init__(own, group, followers, beside, depth)
        self._device = own

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        """Prepare all ranks. Rank 0 compiles first, so that the others find most kernels on disk."""
        self._device.compile_first(token_budget, while_compiling)
        with reported(self._group, self._followers):
            self._followers.send(LARGEST + encode_largest(LargestStep(token_budget, step_bytes)))
            self._device.hold(step_bytes)
            self._device.run_widest_step(token_budget)
            self._device.capture_largest()

    def next_idle_task(self) -> bool:
        with reported(self._group, self._followers):
            self._followers.send(IDLE)
            return self._device.next_idle_task()


def run_device_message(runner: StagedCudaRunner, message: bytes) -> bytes | None:
    """Carry out a message of rank 0 on another rank, and return the answer, if there is one."""
    kind = message[:1]
    if kind == LARGEST:
        largest = decode_largest(message[1:])
        runner.run_largest_step(largest.token_budget, largest.step_bytes, lambda: None)
    elif kind == IDLE:
        runner.next_idle_task()
    else:
        return run_message(runner, message)
    return None
