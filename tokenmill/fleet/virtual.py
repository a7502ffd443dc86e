"""A simulated fleet on a virtual clock: front, routing, scheduler and caches are real, only the model is simulated.

    VirtualDevice   the simulated step times and limits of a core
    VirtualLoop     an event loop whose clock jumps to the next timer instead of waiting for it
    virtual_engine  an `AsyncEngine` over simulated cores

An hour of traffic takes a minute, and the same traffic gives the same figures every time, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.core import EngineCore
from tokenmill.engine.core_client import Receive
from tokenmill.engine.frontend import ModelFrontend, load_frontend
from tokenmill.engine.loop import handle_message
from tokenmill.engine.messages import Failed, FromCore, Outputs, Ready, Shutdown, ToCore
from tokenmill.engine.replicas import FleetKeeper, Router
from tokenmill.engine.roles import Role
from tokenmill.engine.status import CoreInfo
from tokenmill.errors import UnknownModel
from tokenmill.fleet.virtual_blocks import VirtualBlocks, VirtualFetcher
from tokenmill.guided.masks import StepMasks
from tokenmill.kv.cache import KVCache
from tokenmill.sampling.rng import mix
from tokenmill.scheduler import Scheduler
from tokenmill.store import resolve_model
from tokenmill.text.template import CHATML
from tokenmill.text.tokenizer import byte_tokenizer
from tokenmill.types import RowInit, RowPlan, RowResult, StepPlan, StepResult

T = TypeVar("T")
FIRST_TOKEN, END_TOKEN = 32, 127  # tokens are bytes; only printable ASCII is sampled, so each is one character


@dataclass(frozen=True)
class VirtualDevice:
    """The simulated speed of a core: a step takes `step_s`, plus `token_s` for each prompt token, plus `row_s` for each
    sequence that samples a token and `context_s` for each token that this one attends to."""

    step_s: float = 0.005
    token_s: float = 25e-6
    row_s: float | None = None  # None: the same as `token_s`
    context_s: float = 0.0
    num_blocks: int = 4096
    block_size: int = 16
    max_running: int = 64
    token_budget: int = 2048
    max_context: int = 131_072
    start_s: float = 0.0  # from the start of a core until it is ready
    block_s: float = 0.0  # transfer time of a KV block between cores, if they exchange blocks
    slo: str | None = None  # the scheduler's latency objectives

    def seconds(self, plan: StepPlan) -> float:
        """Return the seconds of a step."""
        row_s = self.token_s if self.row_s is None else self.row_s
        total_s = self.step_s
        for row in plan.rows:
            number = len(row.token_ids)
            is_decode = row.sample and number == 1
            total_s += row_s if is_decode else number * self.token_s
            total_s += number * (row.start + 1) * self.context_s if is_decode else 0.0
        return total_s


@dataclass(frozen=True)
class VirtualWords:
    """The tokens that a simulated model samples."""

    token_ids: Sequence[int] = range(FIRST_TOKEN, END_TOKEN)
    end_token_id: int | None = None  # None: answers end only at their maximum length
    mean_length: int = 256  # of an answer


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: its clock jumps to the next timer instead."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        timers: list[Any] = self._scheduled  # type: ignore[attr-defined]  # as asyncio's own loops keep them
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count = max(0, self._timer_cancelled_count - 1)
        if not self._ready and timers:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, timers[0]._when)
        super()._run_once()  # type: ignore[misc]

    _timer_cancelled_count: int


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a `VirtualLoop`, whose clock starts at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class VirtualRunner:
    """Samples tokens that depend only on a sequence's seed and position, and adds up the simulated seconds."""

    depth = 1
    adapters: Mapping[str, Any] = {}

    def __init__(self, device: VirtualDevice, words: VirtualWords) -> None:
        self.ahead_s = 0.0  # how far its steps are ahead of the loop's clock
        self._device = device
        self._words = words
        self._seeds: dict[int, int] = {}
        self._plans: deque[StepPlan] = deque()

    def continues(self, new: RowInit) -> bool:
        return False

    def launch(self, plan: StepPlan) -> int:
        for new in plan.new_rows:
            self._seeds[new.row] = new.seed
        self._plans.append(plan)
        return plan.step

    def draw(self, ticket: int, masks: StepMasks) -> None:
        raise NotImplementedError("virtual cores do not support grammars")

    def collect(self, ticket: int) -> StepResult:
        plan = self._plans.popleft()
        seconds = self._device.seconds(plan)
        self.ahead_s += seconds
        rows = [RowResult(row=row.row, token_ids=[self._drawn(row)] if row.sample else []) for row in plan.rows]
        return StepResult(step=plan.step, rows=rows, step_s=seconds)

    def _drawn(self, row: RowPlan) -> int:
        drawn, words = mix(self._seeds[row.row] + row.output_index), self._words
        if words.end_token_id is not None and (drawn >> 32) % words.mean_length == 0:
            return words.end_token_id
        return words.token_ids[drawn % len(words.token_ids)]

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        pass

    def next_idle_task(self) -> bool:
        return False

    def pass_time(self, seconds: float) -> None:
        """Let time pass without a step."""
        self.ahead_s += seconds


class VirtualCoreClient:
    """The client of a simulated core, whose steps take time of the loop's clock."""

    def __init__(
        self, device: VirtualDevice, words: VirtualWords | None = None, blocks: VirtualBlocks | None = None
    ) -> None:
        """`blocks`: the caches of all cores; None: cores do not exchange blocks."""
        self._device = device
        self._loop = asyncio.get_running_loop()
        self._runner = VirtualRunner(device, words or VirtualWords())
        self._blocks = blocks
        self.core = virtual_core(device, self._runner, lambda: self._loop.time() + self._runner.ahead_s, blocks)
        self._inbox: list[ToCore] = []
        self._receive: Receive | None = None
        self._is_busy = False
        self._is_dead = False

    async def start(self, receive: Receive) -> None:
        self._receive = receive
        self._loop.call_later(self._device.start_s, self._deliver, Ready(self.core.info))

    def send(self, message: ToCore) -> None:
        self._inbox.append(message)
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._turn)

    def silent_s(self) -> float:
        return 0.0

    def kill(self) -> None:
        """End the core in the middle of a step, whose result is lost."""
        if not self._is_dead:
            self._deliver(Failed("the virtual core was killed"))
            self._end()

    async def close(self) -> None:
        self._end()

    def _end(self) -> None:
        self._is_dead = True
        if self._blocks is not None:
            self._blocks.remove(self.core.info.block_address)

    def _deliver(self, message: FromCore) -> None:
        if not self._is_dead and self._receive is not None:
            self._receive(message)

    def _turn(self) -> None:
        messages, self._inbox = self._inbox, []
        for message in messages:
            if not isinstance(message, Shutdown):
                handle_message(self.core, message)
        outputs = self.core.step() if self.core.has_work else []
        seconds, self._runner.ahead_s = self._runner.ahead_s, 0.0
        self._loop.call_later(
            seconds, self._end_step, Outputs(outputs, self.core.stats(), self.core.pop_cache_events())
        )

    def _end_step(self, message: Outputs) -> None:
        self._deliver(message)
        self._is_busy = not self._is_dead and (self.core.has_work or bool(self._inbox))
        if self._is_busy:
            self._turn()


def virtual_core(
    device: VirtualDevice, runner: VirtualRunner, clock: Callable[[], float], blocks: VirtualBlocks | None = None
) -> EngineCore:
    cache = KVCache(windows=(None,), num_blocks=device.num_blocks + 1, block_size=device.block_size)
    fetcher = None if blocks is None else VirtualFetcher(blocks, device.block_s, runner.pass_time)
    scheduler = Scheduler(
        config=virtual_config(device).scheduler,
        cache=cache,
        max_rows=device.max_running,
        clock=clock,
        fetcher=fetcher,
    )
    info = CoreInfo(
        max_context=device.max_context,
        num_blocks=device.num_blocks,
        block_size=device.block_size,
        max_running=device.max_running,
        device="virtual",
        block_address="" if blocks is None else blocks.add(cache.prefix),
    )
    return EngineCore(scheduler, runner, info, clock=clock)


def virtual_config(device: VirtualDevice) -> EngineConfig:
    return EngineConfig(
        ModelConfig(model="virtual", max_context=device.max_context),
        CacheConfig(num_blocks=device.num_blocks, block_size=device.block_size),
        SchedulerConfig(
            max_running=device.max_running, token_budget=device.token_budget, max_waiting=1 << 20, slo=device.slo
        ),
    )


def virtual_frontend(device: VirtualDevice, name: str = "virtual") -> ModelFrontend:
    """Return the front end of a model whose tokens are bytes; of its spec only the limits are used."""
    tokenizer = byte_tokenizer().with_chat_template(CHATML)
    layer = LayerSpec(Gqa(1, 1, 2, 1.0, None), MlpSpec(16))
    spec = ModelSpec(
        family="virtual",
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        layers=(layer,),
        norm_eps=1e-5,
        max_context=device.max_context,
        tied_head=True,
        eos_token_ids=(),
    )
    return ModelFrontend(virtual_config(device), name, Path("virtual"), spec, tokenizer, 0)


def virtual_engine(
    device: VirtualDevice,
    num_replicas: int,
    router: Router | None = None,
    *,
    keepers: Sequence[FleetKeeper] = (),
    num_started: int | None = None,
    roles: Sequence[Role] = (),
    gives_blocks: bool = False,
) -> AsyncEngine:
    """Return an engine over virtual cores, to be opened in a `VirtualLoop`, or in any other loop, where its cores sleep
    in real time. `gives_blocks`: whether cores fetch KV blocks from each other."""
    blocks = VirtualBlocks() if gives_blocks else None
    makers = [lambda: VirtualCoreClient(device, blocks=blocks)] * num_replicas
    return AsyncEngine(
        virtual_frontend(device), makers, router=router, keepers=keepers, num_started=num_started, roles=roles
    )


SAMPLE = "The quick brown fox jumps over the lazy dog, and then it sleeps for a while under an old tree near the river."


def frontend_without_weights(
    config: EngineConfig, device: VirtualDevice, mean_length: int
) -> tuple[ModelFrontend, VirtualWords]:
    """Return a model's front and the tokens of its virtual cores. If the model's files are missing, tokens are bytes,
    so a prompt has about four times as many."""
    limits = virtual_config(device)
    try:
        resolve_model(config.model.model, allow_pull=False)
        frontend = load_frontend(config)
    except UnknownModel:
        frontend = virtual_frontend(device, config.model.served_name or config.model.model)
    tokenizer = frontend.tokenizer or byte_tokenizer()
    ends = frontend.eos_token_ids or tokenizer.eos_token_ids
    words = VirtualWords(
        tuple(dict.fromkeys(tokenizer.encode(SAMPLE, add_special_tokens=False))), ends[0] if ends else None, mean_length
    )
    scheduler = replace(limits.scheduler, max_waiting=config.scheduler.max_waiting, slo=config.scheduler.slo)
    return replace(frontend, config=replace(config, cache=limits.cache, scheduler=scheduler)), words
