"""Local models as the loader sees them: read from their files, planned, and started as engines.

The tokenizer and the chat template stay in the server's process when a model is unloaded. They are small, and with them
an unloaded model can still be listed, described and used to tokenise. Its weights and its KV cache are in the engine's
process, which ends.
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
    """The inputs for planning a model's memory."""

    config: EngineConfig
    path: Path
    name: str
    available_bytes: int | None
    num_models: int


Announce = Callable[[], list[str]]  # returns log lines with a model's expected memory
PLAN_WARNING = "plan: warning: "  # prefix of the lines that are warnings
StartEngine = Callable[[], Awaitable[ServedEngine]]
PlanMemory = Callable[[PlanRequest], ModelMemory]


class EngineSource:
    """A local model, defined by its settings. What was read from its files is kept over loads."""

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
        """`spare`: keeps a started process ready for the next load. `announce`: called during the first load; its lines
        are logged. `num_replicas`: number of engine cores; `roles`: their roles (prefill, decode)."""
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
        return times_replicas(
            self._plan(alone._replace(available_bytes=share)), self._num_replicas, memory.device_bytes
        )

    def held(self) -> ModelMemory:
        assert self._engine is not None
        cache = replace(self._config.cache, num_blocks=self._engine.core.num_blocks)
        frontend, config = self._read(), replace(self._config, cache=cache)
        memory = self._plan(PlanRequest(config, frontend.model_path, frontend.name, None, 1))
        return times_replicas(memory, self._num_replicas, memory.device_bytes) if memory.device == "cpu" else memory

    async def start(self, memory: ModelMemory | None) -> ServedEngine:
        child = self._spare.take(fast_start=self._config.ops.fast_start is not False)
        if memory is None and self._num_replicas > 1:
            memory = await asyncio.to_thread(self.plan, None, 1)
            if memory.problem is not None:
                raise InvalidConfig(memory.problem, param="replicas", hint="ask for fewer replicas")
        config = self._config if memory is None else with_planned_pool(memory, self._config)
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


def times_replicas(memory: ModelMemory, num_replicas: int, device_bytes: int) -> ModelMemory:
    """Return the memory of `num_replicas` cores that take `memory` each."""
    return replace(
        memory,
        device_bytes=device_bytes,
        fixed_bytes=memory.fixed_bytes * num_replicas,
        total_bytes=memory.total_bytes * num_replicas,
    )


def with_planned_pool(memory: ModelMemory, config: EngineConfig) -> EngineConfig:
    """Return the settings with the size of the KV pool that was planned."""
    if memory.num_blocks is None:
        return config
    states = memory.num_states or config.cache.num_states
    return replace(config, cache=replace(config.cache, num_blocks=memory.num_blocks, num_states=states))


def log_plan(lines: list[str] | BaseException) -> None:
    """Log the lines of the plan. A failure to plan is only a warning."""
    if isinstance(lines, BaseException):
        log.warning("plan: the memory could not be planned: %s", lines)
        return
    for line in lines:
        if line.startswith(PLAN_WARNING):
            log.warning("plan: %s", line.removeprefix(PLAN_WARNING))  # the log record has the level
        else:
            log.info("%s", line)


class StartedSource:
    """The source of an engine that the caller starts, for a server with this engine alone."""

    def __init__(self, start_engine: StartEngine) -> None:
        self._start_engine = start_engine

    async def read(self) -> ModelReader:
        return await self._start_engine()

    def plan(self, available_bytes: int | None, num_models: int) -> ModelMemory:
        raise InvalidConfig("this engine can't share a server with other models")

    def held(self) -> ModelMemory:
        return self.plan(None, 1)

    async def start(self, memory: ModelMemory | None) -> ServedEngine:
        return await self._start_engine()


class FrontendReader(ModelText):
    """A model without its engine core. Its context length is the configured one; a small KV pool may reduce it once the
    model is loaded."""

    def __init__(self, frontend: ModelFrontend) -> None:
        max_context = frontend.config.model.max_context or MAX_AUTO_CONTEXT
        processor = frontend.input_processor(min(max_context, frontend.spec.max_context))
        super().__init__(processor)
        adapters = tuple(named_adapters(frontend.config.model.adapter))
        self.info: ModelInfo = replace(frontend.info(processor.max_context), adapters=adapters)
