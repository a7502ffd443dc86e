"""Starting a fleet whose number of cores follows its load, on machines that may join and leave."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.config import EngineConfig
from tokenmill.config.promises import read_service_level
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.frontend import ModelFrontend
from tokenmill.engine.replicas import FleetKeeper
from tokenmill.engine.roles import Role
from tokenmill.engine.startup.spare_core import SpareCore
from tokenmill.fleet.autoscale import CALM_S, Autoscaler, LoadMeter, ScaleRange, ScaleRule
from tokenmill.fleet.places import Places


async def start_cluster(
    frontend: ModelFrontend,
    slots: Sequence[EngineConfig],
    places: Places,
    allowed: ScaleRange,
    *,
    idle_s: float = CALM_S,
    num_started: int | None = None,
    spare: SpareCore | None = None,
    carriers: Sequence[FleetKeeper] = (),
    roles: Sequence[Role] = (),
    num_kept: int = 0,
) -> AsyncEngine:
    """Start a fleet that is scaled within `allowed`, and return once its first cores are ready. `slots`: the settings
    of each possible core. `num_started`: cores to start with, if there are places for them; by default the minimum.
    `carriers`: services that connect other machines; they end after all cores. `roles`: of each core, by default any.
    `num_kept`: the first cores that are never stopped."""
    slo = read_service_level(frontend.config.scheduler.slo)
    meter = LoadMeter(len(slots), slo)
    scaler = Autoscaler(ScaleRule(allowed, slo.ttft_s, idle_s), meter, places.num_free, num_kept=num_kept)
    places.on_change = scaler.wake
    engine = AsyncEngine(
        frontend,
        [places.maker(index, config) for index, config in enumerate(slots)],
        router=meter,
        spare=spare,
        keepers=[*carriers, places, scaler],
        roles=roles,
        num_started=max(1, min(num_started or allowed.least, places.num_free())),
    )
    await engine.open()
    return engine
