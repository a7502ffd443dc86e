"""Models of this machine as the loader sees them: read from their files, planned, started as engines.

Tokenizer and chat template stay in the front when a model leaves the memory: they are small, and with them a parked
model can still be listed, described and asked to tokenise. Its weights and its KV cache live in its engine's process,
which ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tokenmill.config import EngineConfig
from tokenmill.config.adapters import named_adapters
from tokenmill.config.engine import MAX_AUTO_CONTEXT
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.frontend import ModelFrontend, ModelText, load_frontend
from tokenmill.engine.startup.spare_core import SpareCore
from tokenmill.engine.status import ModelInfo
from tokenmill.errors import InvalidConfig
from tokenmill.fleet.start import start_fleet
from tokenmill.observe.log import detail_level, get_log
from tokenmill.server.gate import ModelReader, ServedEngine
from tokenmill.server.loader import ModelMemory

log = get_log("server")


class PlanRequest(NamedTuple):
    """The inputs of a plan of a model's memory."""

    config: EngineConfig
    path: Path
    name: str
    available_bytes: int | None
    num_models: int


Announce = Callable[[], list[str]]  # what the settings of a model will take, in lines
PLAN_WARNING = "plan: warning: "  # begins those that are warnings
StartEngine = Callable[[], Awaitable[ServedEngine]]
PlanMemory = Callable[[PlanRequest], ModelMemory]


class EngineSource:
    """A model by its settings. What was read of it is kept over loads."""

    def __init__(
        self,
        config: EngineConfig,
        plan: PlanMemory,
        spare: SpareCore,
        *,
        announce: Announce | None = None,
        num_replicas: int = 1,
        roles: str | None = None,
    ) -> None:
        """`spare`: a process for the next load, if one waits. `announce` is called beside the first load, and says what
        to log before its choices. `num_replicas`: cores that the model runs on; `roles`: what they are for."""
        self._config = config
        self._plan = plan
        self._spare = spare
        self._announce = announce
        self._num_replicas = num_replicas
        self._roles = roles
        self._frontend: ModelFrontend | None = None
        self._engine: AsyncEngine | None = None

    async def read(self) -> ModelReader:
        return FrontendReader(await asyncio.to_thread(self._read))

    def _read(self) -> ModelFrontend:
        if self._frontend is None:
            self._frontend = load_frontend(self._config)
        return self._frontend

    def plan(self, available_bytes: int | None, num_models: int) -> ModelMemory:
        frontend = self._read()
        alone = PlanRequest(self._config, frontend.model_path, frontend.name, available_bytes, num_models)
        memory = self._plan(alone)
        if self._num_replicas == 1 or memory.device != "cpu":
            return memory
        share = memory.device_bytes // self._num_replicas
        return together(self._plan(alone._replace(available_bytes=share)), self._num_replicas, memory.device_bytes)

    def held(self) -> ModelMemory:
        assert self._engine is not None
        cache = replace(self._config.cache, num_blocks=self._engine.core.num_blocks)
        frontend, config = self._read(), replace(self._config, cache=cache)
        memory = self._plan(PlanRequest(config, frontend.model_path, frontend.name, None, 1))
        return together(memory, self._num_replicas, memory.device_bytes) if memory.device == "cpu" else memory

    async def start(self, memory: ModelMemory | None) -> ServedEngine:
        child = self._spare.take(fast_start=self._config.ops.fast_start is not False)
        if memory is None and self._num_replicas > 1:
            memory = await asyncio.to_thread(self.plan, None, 1)
            if memory.problem is not None:
                raise InvalidConfig(memory.problem, param="replicas", hint="ask for fewer replicas")
        config = self._config if memory is None else within(memory, self._config)
        frontend = None if self._frontend is None else replace(self._frontend, config=config)
        announce, self._announce = self._announce, None
        planning = asyncio.gather(asyncio.to_thread(announce or list), return_exceptions=True)  # while the model loads
        self._engine = engine = await start_fleet(
            config, self._num_replicas, child=child, frontend=frontend, roles=self._roles
        )
        self._frontend = self._frontend or engine.frontend
        log_plan(*await planning)
        whose = "" if memory is None else f" for {engine.info.name}"
        for reason in engine.reasons:
            log.log(detail_level(), "chosen%s: %s", whose, reason)
        log.log(detail_level(), "weights%s loaded in %.2f s", whose, engine.core.load_s)
        await asyncio.to_thread(self._spare.refill)
        return engine


def together(memory: ModelMemory, num_replicas: int, device_bytes: int) -> ModelMemory:
    """Return the memory of several cores that take this much each."""
    return replace(
        memory,
        device_bytes=device_bytes,
        fixed_bytes=memory.fixed_bytes * num_replicas,
        total_bytes=memory.total_bytes * num_replicas,
    )


def within(memory: ModelMemory, config: EngineConfig) -> EngineConfig:
    """Settings with the KV pool that was planned."""
    if memory.num_blocks is None:
        return config
    states = memory.num_states or config.cache.num_states
    return replace(config, cache=replace(config.cache, num_blocks=memory.num_blocks, num_states=states))


def log_plan(lines: list[str] | BaseException) -> None:
    """Log the plan; one that could not be made is only a warning."""
    if isinstance(lines, BaseException):
        log.warning("plan: none could be made: %s", lines)
        return
    for line in lines:
        if line.startswith(PLAN_WARNING):
            log.warning("plan: %s", line.removeprefix(PLAN_WARNING))  # the log names the level itself
        else:
            log.info("%s", line)


class StartedSource:
    """An engine that somebody starts in his own way, for a server of it alone."""

    def __init__(self, start_engine: StartEngine) -> None:
        self._start_engine = start_engine

    async def read(self) -> ModelReader:
        return await self._start_engine()

    def plan(self, available_bytes: int | None, num_models: int) -> ModelMemory:
        raise InvalidConfig("no other model can be served beside this one")

    def held(self) -> ModelMemory:
        return self.plan(None, 1)

    async def start(self, memory: ModelMemory | None) -> ServedEngine:
        return await self._start_engine()


class FrontendReader(ModelText):
    """A model without its core: its context is what its settings ask for, which its KV pool may cut later."""

    def __init__(self, frontend: ModelFrontend) -> None:
        wanted = frontend.config.model.max_context or MAX_AUTO_CONTEXT
        processor = frontend.input_processor(min(wanted, frontend.spec.max_context))
        super().__init__(processor)
        adapters = tuple(named_adapters(frontend.config.model.adapter))
        self.info: ModelInfo = replace(frontend.info(processor.max_context), adapters=adapters)
