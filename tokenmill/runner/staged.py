"""Steps on the stages of a pipeline: several are in flight at a time, each on a different stage.

    core: launch(k+1)  plan ──► all ranks    stage 0: layers of k+1 ──► stage 1 ──► … ──► last stage ─┐
          collect(k)                         stage 0: head of k, sample  ◄────────────────────────────┘

    stage 0  [ 1 ][ 2 ]  head 1 [ 3 ]  head 2 [ 4 ]
    stage 1       [ 1 ]         [ 2 ]         [ 3 ]        steps 1, 3, 5 … and 2, 4, 6 … (lanes) have different rows

`launch` computes the first stage's layers, `collect` waits for the output of the last stage. The tensor-parallel ranks
of the first stage do both in the same order as rank 0; ranks of later stages run each plan when its residual stream
arrives. A sequence whose next token depends on a step in flight is not planned until that step is collected, so steps
in flight have different sequences, or chunks of the same prompt, which pass through the stages in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from tokenmill.guided.masks import StepMasks
from tokenmill.lora.adapter import Adapter
from tokenmill.models.protocol import StagedModel
from tokenmill.parallel.group import RankGroup
from tokenmill.parallel.stage_link import StageLink
from tokenmill.runner.ranked import Followers, adapter_messages, decode_plan, encode_plan, reported, take_adapter
from tokenmill.runner.runner import ModelRunner, RowsForward, RowTask
from tokenmill.types import RowInit, StepPlan, StepResult

PLAN, COLLECT, SECONDS = b"p", b"c", b"s"  # first byte of a message


class Stage(Protocol):
    """A rank's part of each step, as `PipelineRunner` calls it."""

    busy_s: float

    @property
    def rows(self) -> ModelRunner: ...

    def launch(self, plan: StepPlan) -> object: ...

    def collect(self, step: int, masks: StepMasks | None, /) -> StepResult: ...


class StageRunner:
    """A rank's part of each step: its stage's layers, and on the first stage also logits and sampling."""

    def __init__(self, rows: ModelRunner, model: StagedModel, link: StageLink, *, is_first: bool) -> None:
        """`rows`: a runner of the same model, which keeps the state of the rows; it computes no step itself."""
        self.rows = rows
        self._model = model
        self._link = link
        self._is_first = is_first
        self._started: dict[int, tuple[float, list[RowTask]]] = {}
        self.busy_s = 0.0  # spent computing, not waiting for other stages

    def launch(self, plan: StepPlan) -> None:
        """Run this stage's layers. A step without rows sends nothing to the next stage."""
        began_s = time.perf_counter()
        self.rows.apply_changes(plan)
        self.rows.sampler.observe(plan.rows)
        tasks: list[RowTask] = []
        waited_s = 0.0
        if plan.rows:
            tasks, batch = self.rows.prepare_rows(plan.rows)
            wait_s = time.perf_counter()
            entering = None if self._is_first else self._link.receive()
            waited_s = time.perf_counter() - wait_s
            self._link.send(self._model.forward(batch, self.rows.storage, entering))
        if self._is_first:
            self._started[plan.step] = began_s, tasks
        self.busy_s += time.perf_counter() - began_s - waited_s

    def collect(self, step: int, masks: StepMasks | None) -> StepResult:
        """Wait for the last stage, then compute logits and sample."""
        launched_s, tasks = self._started.pop(step)
        hidden = self._link.receive() if tasks else None
        began_s = time.perf_counter()
        rows = [] if hidden is None else self.rows.finish_rows(RowsForward(tasks, hidden), masks)
        ended_s = time.perf_counter()
        self.busy_s += ended_s - began_s
        return StepResult(step=step, rows=rows, step_s=ended_s - launched_s)


class PipelineRunner:
    """Runs steps on all stages, several in flight; the core uses it like any other runner."""

    def __init__(self, own: Stage, group: RankGroup, followers: Followers, beside: int, depth: int) -> None:
        """`beside`: the number of followers, the first ones, that compute the first stage together with this rank."""
        self._own = own
        self._group = group
        self._followers = followers
        self._beside = beside
        self._masks: dict[int, StepMasks] = {}
        self.depth = depth

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._own.rows.adapters

    @adapters.setter
    def adapters(self, by_digest: Mapping[str, Adapter]) -> None:
        self._own.rows.adapters = by_digest

    def stage_seconds(self) -> list[float]:
        """Return how many seconds rank 0 and each follower have computed so far. Call it between steps only."""
        return [self._own.busy_s, *map(float, self._followers.ask(SECONDS))]

    def continues(self, new: RowInit) -> bool:
        """Return False: other stages receive sampled tokens from the host, so it must have seen them."""
        return False

    def launch(self, plan: StepPlan) -> int:
        self._followers.raise_failure()
        for message in adapter_messages(plan, self.adapters):
            self._followers.send(message)
        self._followers.send(PLAN + encode_plan(plan))
        with reported(self._group, self._followers):
            self._own.launch(plan)
        return plan.step

    def draw(self, ticket: int, masks: StepMasks) -> None:
        self._masks[ticket] = masks

    def collect(self, ticket: int) -> StepResult:
        self._followers.raise_failure()
        self._followers.send(COLLECT + str(ticket).encode(), self._beside)
        with reported(self._group, self._followers):
            return self._own.collect(ticket, self._masks.pop(ticket, None))

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        """Do nothing: no memory needs to be allocated beforehand."""

    def next_idle_task(self) -> bool:
        return False


def run_message(runner: Stage, message: bytes) -> bytes | None:
    """Carry out a message of rank 0 on another rank, and return the answer, if there is one."""
    if take_adapter(runner.rows, message):
        return None
    if message[:1] == PLAN:
        runner.launch(decode_plan(message[1:]))
        runner.rows.adapters = {}  # the plan has loaded them into their slots
    elif message[:1] == COLLECT:
        runner.collect(int(message[1:]), None)
    else:
        return str(runner.busy_s).encode()
    return None
