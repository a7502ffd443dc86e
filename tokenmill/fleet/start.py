"""Starting a model on several cores: each core's share of the machine, and a spare process for the next restart.

On CPUs the cores share threads and memory evenly. On GPUs each core has its own device. A spare process with imported
libraries waits in reserve (not on GPUs, where it would have to be bound to one device), so that restarting a dead core
takes only as long as loading its weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from tokenmill.config import EngineConfig
from tokenmill.config.cluster import MAX_REPLICAS
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.core_client import CoreClient, ProcessCoreClient, start_core_process
from tokenmill.engine.core_process import CoreProcess
from tokenmill.engine.core_supervisor import MakeClient
from tokenmill.engine.frontend import ModelFrontend, load_frontend
from tokenmill.engine.roles import read_roles
from tokenmill.engine.startup.spare_core import SpareCore
from tokenmill.errors import InvalidConfig
from tokenmill.fleet.router import PrefixRouter
from tokenmill.hardware.cpu import probe_cpu
from tokenmill.hardware.gpu import probe_nvidia
from tokenmill.hardware.torch_build import torch_computes_on_gpus
from tokenmill.store import is_scripted


def gpus_of(config: EngineConfig, num_replicas: int) -> list[int]:
    """Return the GPU of each core; empty: they run on CPUs."""
    uses_gpus = config.ops.device == "cuda" or (config.ops.device == "auto" and torch_computes_on_gpus())
    if is_scripted(config.model.model) or not uses_gpus:
        return []
    found = [gpu.index for gpu in probe_nvidia()]
    if found and len(found) < num_replicas:
        raise InvalidConfig(
            f"{num_replicas} replicas need as many GPUs, but there are {len(found)}",
            param="replicas",
            hint="use fewer replicas, or --device cpu",
        )
    return found[:num_replicas]


def for_each(config: EngineConfig, num_replicas: int) -> EngineConfig:
    """Return the settings of one of several cores on a machine's CPUs: its share of the threads, unless they are
    set."""
    if num_replicas == 1 or is_scripted(config.model.model) or config.ops.threads is not None:
        return config
    threads = max(1, probe_cpu().usable_cores // num_replicas)
    return replace(config, ops=replace(config.ops, threads=threads))


async def start_fleet(
    config: EngineConfig,
    num_replicas: int,
    *,
    child: CoreProcess | None = None,
    frontend: ModelFrontend | None = None,
    roles: str | None = None,
) -> AsyncEngine:
    """Load the model on `num_replicas` cores and return once all are ready. `child`: a pre-started process for the
    first core. `roles`: the comma-separated roles of the cores. A single core is started without a fleet."""
    parsed_roles = read_roles(roles, num_replicas) if roles else []
    if num_replicas == 1:
        return await AsyncEngine.start(config, child=child, frontend=frontend)
    if not 1 <= num_replicas <= MAX_REPLICAS:
        raise InvalidConfig(f"replicas must be between 1 and {MAX_REPLICAS}, got {num_replicas}", param="replicas")
    with contextlib.ExitStack() as undo:
        if child is not None:
            undo.callback(child.kill)
        gpus = gpus_of(config, num_replicas)
        config = config if gpus else for_each(config, num_replicas)
        read = await asyncio.to_thread(load_frontend, config) if frontend is None else replace(frontend, config=config)
        undo.pop_all()
    spare = SpareCore(is_refilled=not gpus and config.ops.fast_start is not False)
    first = [child] if child is not None else []
    makers = [
        _maker(read, gpus[index] if gpus else None, spare, first if index == 0 else []) for index in range(num_replicas)
    ]
    engine = AsyncEngine(read, makers, router=PrefixRouter(num_replicas), spare=spare, roles=parsed_roles)
    await engine.open()
    return engine


def _maker(frontend: ModelFrontend, gpu: int | None, spare: SpareCore, first: list[CoreProcess]) -> MakeClient:
    """Return the client factory of one core, used for its first start and for restarts."""
    config = frontend.config

    def make_client() -> CoreClient:
        process = first.pop() if first else spare.take(fast_start=config.ops.fast_start is not False)
        if process is None:
            environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
            process = start_core_process(config, environment)
        return ProcessCoreClient(config, frontend.model_path, process)

    return make_client
