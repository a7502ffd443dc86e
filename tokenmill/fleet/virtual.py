"""A fleet on a clock of its own: front, routing, scheduler and caches are the true ones; only the model is not there.

    VirtualDevice   how long steps take, and how much a core holds
    VirtualLoop     an event loop whose clock jumps to the next timer instead of waiting for it
    virtual_engine  an `AsyncEngine` over cores whose steps take the device's seconds, of that clock

An hour of traffic takes a minute, and the same traffic gives the same figures every time, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.core import EngineCore
from tokenmill.engine.core_client import Receive
from tokenmill.engine.frontend import ModelFrontend
from tokenmill.engine.loop import handle_message
from tokenmill.engine.messages import Failed, FromCore, Outputs, Ready, Shutdown, ToCore
from tokenmill.engine.replicas import Router
from tokenmill.engine.status import CoreInfo
from tokenmill.guided.masks import StepMasks
from tokenmill.kv.cache import KVCache
from tokenmill.sampling.rng import mix
from tokenmill.scheduler import Scheduler
from tokenmill.text.tokenizer import byte_tokenizer
from tokenmill.types import RowInit, RowResult, StepPlan, StepResult

T = TypeVar("T")
FIRST_TOKEN, END_TOKEN = 32, 127  # tokens are bytes, and those that are said are ASCII: each is a character of text


@dataclass(frozen=True)
class VirtualDevice:
    """What a core is taken to be able to do: a step takes `step_s` and `token_s` for each token that it feeds."""

    step_s: float = 0.005
    token_s: float = 25e-6
    num_blocks: int = 4096
    block_size: int = 16
    max_running: int = 64
    token_budget: int = 2048
    max_context: int = 131_072
    start_s: float = 0.0  # from the start of a core until it is ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: where it would, its clock jumps."""

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
    """Run to the end, on a clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class VirtualRunner:
    """Draws tokens that depend on a sequence's seed and position alone, and counts the seconds that it would take."""

    depth = 1
    adapters: Mapping[str, Any] = {}

    def __init__(self, device: VirtualDevice) -> None:
        self.ahead_s = 0.0  # how far its steps are ahead of the loop's clock
        self._device = device
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
        raise NotImplementedError("a virtual core follows no grammar")

    def collect(self, ticket: int) -> StepResult:
        plan = self._plans.popleft()
        seconds = self._device.step_s + plan.num_tokens * self._device.token_s
        self.ahead_s += seconds
        rows = [
            RowResult(row=row.row, token_ids=[drawn(self._seeds[row.row], row.output_index)] if row.sample else [])
            for row in plan.rows
        ]
        return StepResult(step=plan.step, rows=rows, step_s=seconds)

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        pass

    def next_idle_task(self) -> bool:
        return False


def drawn(seed: int, output_index: int) -> int:
    return FIRST_TOKEN + mix(seed + output_index) % (END_TOKEN - FIRST_TOKEN)


class VirtualCoreClient:
    """A core whose steps end when the loop's clock says so."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._loop = asyncio.get_running_loop()
        self._runner = VirtualRunner(device)
        self.core = virtual_core(device, self._runner, lambda: self._loop.time() + self._runner.ahead_s)
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
        """Die in the middle of a step: what it would have brought is lost."""
        if not self._is_dead:
            self._deliver(Failed("the virtual core was killed"))
            self._is_dead = True

    async def close(self) -> None:
        self._is_dead = True

    def _deliver(self, message: FromCore) -> None:
        if not self._is_dead and self._receive is not None:
            self._receive(message)

    def _turn(self) -> None:
        messages, self._inbox = self._inbox, []
        for message in messages:
            if not isinstance(message, Shutdown):
                handle_message(self.core, message)
        self._is_busy = self.core.has_work
        outputs = self.core.step() if self._is_busy else []
        seconds, self._runner.ahead_s = self._runner.ahead_s, 0.0
        self._loop.call_later(seconds, self._end_step, Outputs(outputs, self.core.stats(), self.core.pop_news()))

    def _end_step(self, message: Outputs) -> None:
        self._deliver(message)
        if self._is_busy and not self._is_dead:
            self._turn()


def virtual_core(device: VirtualDevice, runner: VirtualRunner, clock: Callable[[], float]) -> EngineCore:
    cache = KVCache(windows=(None,), num_blocks=device.num_blocks + 1, block_size=device.block_size)
    scheduler = Scheduler(
        config=virtual_config(device).scheduler, cache=cache, max_rows=device.max_running, clock=clock
    )
    info = CoreInfo(
        max_context=device.max_context,
        num_blocks=device.num_blocks,
        block_size=device.block_size,
        max_running=device.max_running,
        device="virtual",
    )
    return EngineCore(scheduler, runner, info, clock=clock)


def virtual_config(device: VirtualDevice) -> EngineConfig:
    return EngineConfig(
        ModelConfig(model="virtual", max_context=device.max_context),
        CacheConfig(num_blocks=device.num_blocks, block_size=device.block_size),
        SchedulerConfig(max_running=device.max_running, token_budget=device.token_budget, max_waiting=1 << 20),
    )


def virtual_frontend(device: VirtualDevice) -> ModelFrontend:
    """A model of bytes; nothing of its spec but the limits is looked at."""
    tokenizer = byte_tokenizer()
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
    return ModelFrontend(virtual_config(device), "virtual", Path("virtual"), spec, tokenizer, 0)


def virtual_engine(device: VirtualDevice, num_replicas: int, router: Router | None = None) -> AsyncEngine:
    """An engine over virtual cores; to be opened in a `VirtualLoop`, or in any loop, where its cores sleep."""
    makers = [lambda: VirtualCoreClient(device)] * num_replicas
    return AsyncEngine(virtual_frontend(device), makers, router=router)
