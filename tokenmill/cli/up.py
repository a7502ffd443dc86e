"""`tokenmill up`: run a cluster described by a file. Plan every topology that fits, print which one is chosen and why,
start the front end and the replicas, and keep as many replicas running as the load needs.

    cluster.toml ─► plan: replicas × ranks ─► front end + replicas ─► supervised, scaled, restarted

With --dry-run it ends after the plan. With --search the best three topologies are measured (`up_search.py`). With
--virtual h200x8 the model sleeps for the predicted time of each step instead of computing; front end, scheduler,
routing and autoscaler are real.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tokenmill.arch.unproven import VARIABLE, is_chosen
from tokenmill.cli import flags
from tokenmill.cli.flags import Count, Switch
from tokenmill.cli.output import print_table
from tokenmill.config import EngineConfig
from tokenmill.config.cluster import ClusterConfig, GroupConfig, HostsConfig, read_cluster
from tokenmill.config.server import ServerConfig
from tokenmill.engine.resolve import require_ranges
from tokenmill.engine.roles import Role, read_roles
from tokenmill.engine.startup.core_prestart import take_core
from tokenmill.errors import InvalidConfig
from tokenmill.store import is_scripted

if TYPE_CHECKING:
    from tokenmill.engine.async_engine import AsyncEngine
    from tokenmill.engine.replicas import FleetKeeper
    from tokenmill.fleet.autoscale import ScaleRange
    from tokenmill.fleet.join import JoinListener
    from tokenmill.fleet.places import Places
    from tokenmill.fleet.virtual import VirtualDevice
    from tokenmill.planner.device import PlanDevice
    from tokenmill.planner.model import PlannedModel
    from tokenmill.planner.plan import Question
    from tokenmill.planner.topologies import Topology
    from tokenmill.server.engine_source import StartEngine

VIRTUALLY_UNUSED = {
    "cache": ("kv_disk", "kv_disk_gb", "kv_host_gb", "kv_transfer"),
    "parallel": ("ep", "expert_loads", "expert_copies", "dp_attention", "lanes", "link", "rank_gpus", "stages_at"),
}


@dataclass(frozen=True)
class PlannedGroup:
    """A group of replicas with the engine settings chosen for it."""

    group: GroupConfig
    engine: EngineConfig  # settings of each replica
    topology: Topology | None = None  # None for a scripted model, which has no weights

    @property
    def num_replicas(self) -> int:
        """Maximum number of replicas, on all machines."""
        return self.group.most


def command(
    cluster: Annotated[Path, Parameter(help="TOML file that describes the cluster; see docs/cluster.md.")],
    /,
    *,
    dry_run: Switch = False,
    search: Switch = False,
    search_trials: Count = 12,
    take: str = "",
    virtual: str = "",
    server: flags.ServerFlags = flags.SERVER,
    engine: flags.ServerEngineFlags = flags.ENGINE,
) -> int:
    """Plan, start and autoscale a cluster of replicas behind one port.

    Parameters
    ----------
    dry_run
        Print the plan and the reasons; start nothing.
    search
        Start the three best topologies in turn, measure the largest load that each serves within the latency targets
        (`tokenmill bench search`), and use the best.
    search_trials
        Maximum trials of --search per topology.
    take
        Use this topology instead of the planner's choice, such as 4x2: four replicas of two ranks.
    virtual
        Simulate the cluster on devices such as h200x8: the model sleeps for the predicted time of each step.
    """
    found = read_cluster(cluster)
    for sentence in found.deprecated:
        print(f"tokenmill: {sentence}", file=sys.stderr)
    read_roles(",".join(group.role for group in found.groups), len(found.groups))
    base = engine.config(None)
    refuse_idle_settings(server, base, virtual, found)
    require_ranges(base)
    if search:
        if len(found.groups) > 1 or take:
            raise InvalidConfig("--search needs a single group, and excludes --take", param="search")
        take = search_topologies(cluster, found, base, virtual, search_trials)
    planned = plan_groups(found, base, virtual, take)
    if virtual and (without := settings_without_effect(base)):
        print(f"Virtual devices do without {', '.join(without)}.\n", flush=True)
    if dry_run:
        require_computable(planned, base, virtual)
        return 0
    if virtual:
        return run_virtual(found, planned, server)
    return run_here(found, planned, base, server)


def refuse_idle_settings(server: ServerConfig, base: EngineConfig, virtual: str, cluster: ClusterConfig) -> None:
    if server.replicas != 1:
        raise InvalidConfig("the number of replicas is set by the file's [[group]]", param="replicas")
    if server.roles is not None:
        raise InvalidConfig("roles are set by the file's [[group]]", param="roles")
    for name in ("tp", "pp"):
        if getattr(base.parallel, name) != 1:
            raise InvalidConfig("the number of ranks is set by the file's [[group]]", param=name)
    if virtual and is_scripted(base.model.model):
        raise InvalidConfig(
            "--virtual simulates a model's computing time, which a scripted model does not have", param="virtual"
        )
    if virtual and (cluster.hosts.listen or cluster.hosts.ray):
        raise InvalidConfig(
            "--virtual starts all replicas in this process, so no other machine can join", param="virtual",
            hint="use a file without [hosts]",
        )  # fmt: skip


def settings_without_effect(base: EngineConfig) -> list[str]:
    """Return the names of changed settings that have no effect on a virtual device."""
    usual = EngineConfig()
    return [
        name
        for section, names in VIRTUALLY_UNUSED.items()
        for name in names
        if getattr(getattr(base, section), name) != getattr(getattr(usual, section), name)
    ]


def require_computable(planned: Sequence[PlannedGroup], base: EngineConfig, virtual: str) -> None:
    """Refuse settings that a replica would refuse when it starts on this machine."""
    if virtual or is_scripted(base.model.model):
        return
    from tokenmill.arch.read import read_spec
    from tokenmill.cli import session
    from tokenmill.engine.resolve import resolve_model_config

    path = session.fetch(base.model.model).path
    for one in planned:
        if one.topology is not None:  # else its replicas run on other machines
            resolve_model_config(one.engine, read_spec(path), path)


# ── planning ─────────────────────────────────────────────────────────────────────────────────────────


def plan_groups(cluster: ClusterConfig, base: EngineConfig, virtual: str, take: str = "") -> list[PlannedGroup]:
    """Choose a topology for each group and print the reason. `take`: use this one instead."""
    if take and (len(cluster.groups) > 1 or not cluster.hosts.local or is_scripted(base.model.model)):
        raise InvalidConfig("--take needs a single group that runs on this machine", param="take")
    if not cluster.hosts.local:
        print("No replica runs on this machine; the other machines adapt the settings to themselves.", flush=True)
        return [PlannedGroup(group, with_ranks(base, group.tp or 1, group.pp)) for group in cluster.groups]
    if is_scripted(base.model.model):
        if any(group.tp not in (None, 1) or group.pp > 1 for group in cluster.groups):
            raise InvalidConfig("a scripted model has no ranks", param="tp")
        print("A scripted model has no weights, so there is nothing to plan.", flush=True)
        return [PlannedGroup(group, base) for group in cluster.groups]
    from tokenmill.planner.topologies import TITLES, named_topology, reason, rows

    model, device, number = devices_of(base, virtual)
    question = asked_question(cluster, base, device)
    if not virtual and not device.is_cpu and not is_chosen("gpu_ranks"):
        print(f"A replica has one GPU: several have not been run yet ({VARIABLE}=gpu_ranks plans them too).")

    def found_on(group: GroupConfig, num_devices: int) -> list[Topology]:
        return topologies_of(group, cluster, base, virtual, model, device, num_devices)

    planned, left = [], number
    for index, group in enumerate(cluster.groups):
        later = [] if device.is_cpu else cluster.groups[index + 1 :]  # replicas on a CPU share it
        own = max(1, left - sum(fewest_devices(found_on(one, number)) for one in later))
        found = found_on(group, own)
        print(
            f"{model.name} on {own} × {device.name}, {question.input_len} + {question.output_len} tokens per request:"
        )
        print_table(TITLES, rows(found))
        chosen = found[0] if not take else named_topology(take, found)
        print(f"Chosen: {f'{take}, by --take' if take else reason(found)}.")
        print("".join(f"Note: {warning}.\n" for warning in chosen.plan.warnings()), flush=True)
        planned.append(PlannedGroup(group, engine_of(base, chosen, number, is_virtual=bool(virtual)), chosen))
        left -= 0 if device.is_cpu else chosen.num_replicas * chosen.num_ranks
    return planned


def fewest_devices(found: Sequence[Topology]) -> int:
    """Return the number of devices that a group can't do without."""
    able = [one for one in found if one.plan.memory.fits] or found
    return min(max(1, one.asked.least) * one.num_ranks for one in able)


def devices_of(base: EngineConfig, virtual: str) -> tuple[PlannedModel, PlanDevice, int]:
    """Return the model, the device of the plan, and the number of devices."""
    from tokenmill.planner.device import this_machine
    from tokenmill.planner.model import find_model, model_at
    from tokenmill.planner.topologies import named_devices

    if virtual:
        return find_model(base.model.model), *named_devices(virtual)
    from tokenmill.cli import session

    files = session.fetch(base.model.model)
    device = this_machine(use_gpu=may_use_gpu(base), threads=base.ops.threads)
    return model_at(files.path, files.name), device, num_local_devices(device, base)


def topologies_of(
    group: GroupConfig,
    cluster: ClusterConfig,
    base: EngineConfig,
    virtual: str,
    model: PlannedModel,
    device: PlanDevice,
    num_devices: int,
) -> list[Topology]:
    """Return every topology of a group on `num_devices` devices, the best first."""
    from tokenmill.planner.topologies import Asked, topologies

    here = cluster.most if virtual else cluster.num_local
    most = here if device.is_cpu else min(here, group.most)
    requests_s = cluster.load.requests_s if len(cluster.groups) == 1 else None
    has_one_gpu = group.tp is None and not (virtual or device.is_cpu or is_chosen("gpu_ranks"))
    asked = Asked(min(group.least, most), most, 1 if has_one_gpu else group.tp, group.pp, requests_s)
    return topologies(model, device, num_devices, asked_question(cluster, base, device), asked)


def search_topologies(path: Path, cluster: ClusterConfig, base: EngineConfig, virtual: str, num_trials: int) -> str:
    """Measure the best topologies of the plan; return the name of the one that serves the largest load."""
    if not cluster.hosts.local or is_scripted(base.model.model):
        raise InvalidConfig("--search needs a model that runs on this machine", param="search")
    from tokenmill.cli.up_search import best_of

    found = topologies_of(cluster.groups[0], cluster, base, virtual, *devices_of(base, virtual))
    return best_of(path, found, cluster.load, base.scheduler.slo, num_trials)


def asked_question(cluster: ClusterConfig, base: EngineConfig, device: PlanDevice) -> Question:
    from tokenmill.config.promises import read_service_level
    from tokenmill.planner.capacity import Slo
    from tokenmill.planner.plan import Question

    promised = read_service_level(base.scheduler.slo)
    rows, tokens = device.runs_on.limits(device.available_bytes)
    return Question(
        input_len=cluster.load.input_len,
        output_len=cluster.load.output_len,
        dtype=base.model.dtype,
        kv_dtype=base.cache.kv_dtype,
        max_context=base.model.max_context,
        max_running=base.scheduler.max_running or rows,
        token_budget=base.scheduler.token_budget or tokens,
        memory_fraction=base.cache.memory_fraction,
        block_size=base.cache.block_size,
        num_blocks=base.cache.num_blocks,
        slo=Slo(promised.ttft_s, promised.tpot_s),
    )


def may_use_gpu(base: EngineConfig) -> bool:
    from tokenmill.hardware.torch_build import torch_computes_on_gpus

    return base.ops.device == "cuda" or (base.ops.device == "auto" and torch_computes_on_gpus())


def num_local_devices(device: PlanDevice, base: EngineConfig) -> int:
    """Return the number of GPUs of this machine, or of CPU threads."""
    from tokenmill.hardware.cpu import probe_cpu
    from tokenmill.hardware.gpu import probe_nvidia

    return (base.ops.threads or probe_cpu().usable_cores) if device.is_cpu else len(probe_nvidia())


def with_ranks(base: EngineConfig, tp: int, pp: int) -> EngineConfig:
    return replace(base, parallel=replace(base.parallel, tp=tp, pp=pp))


def engine_of(base: EngineConfig, chosen: Topology, num_devices: int, *, is_virtual: bool) -> EngineConfig:
    """Return the settings of a replica: its ranks, its share of the threads, its planned KV pool."""
    config = with_ranks(base, chosen.tp, chosen.asked.pp)
    if is_virtual or not chosen.plan.device.is_cpu:
        return config
    threads = max(1, num_devices // (chosen.num_replicas * chosen.num_ranks))
    memory = chosen.plan.memory
    cache = replace(base.cache, num_blocks=memory.num_blocks, num_states=memory.num_states or base.cache.num_states)
    return replace(config, ops=replace(base.ops, threads=threads), cache=cache)


# ── running ──────────────────────────────────────────────────────────────────────────────────────────


def run_here(cluster: ClusterConfig, planned: Sequence[PlannedGroup], base: EngineConfig, server: ServerConfig) -> int:
    """Start the cluster on this machine, which other machines can join."""
    from tokenmill.engine.frontend import load_frontend
    from tokenmill.engine.startup.spare_core import SpareCore
    from tokenmill.fleet.elastic import start_cluster
    from tokenmill.fleet.link import read_key
    from tokenmill.fleet.places import LocalPlace, Places
    from tokenmill.fleet.start import gpus_of

    slots = slots_of(planned)
    first, num_local = planned[0].engine, cluster.num_local
    gpus = gpus_of(first, num_local * first.parallel.num_ranks) if num_local else []
    key = None if cluster.hosts.listen is None else read_key(cluster.hosts.key_file, None)
    spare = SpareCore(take_core(fast_start=bool(first.ops.fast_start)), is_refilled=not gpus)

    async def start() -> AsyncEngine:
        frontend = await asyncio.to_thread(load_frontend, first)
        places = Places(*([LocalPlace(frontend, num_local, gpus=gpus, spare=spare)] if num_local else []))
        carriers: list[FleetKeeper] = []
        if key is not None:
            joining = await listener(cluster.hosts, key, places, base, frontend.model_path)
            carriers = [joining, *ray_keepers(cluster, joining, places, len(slots) - num_local)]
        return await start_cluster(
            frontend, slots, places, allowed(cluster, planned), idle_s=cluster.idle_s,
            num_started=num_needed(planned), spare=spare, carriers=carriers, roles=roles_of(planned),
            num_kept=cluster.least if cluster.has_roles else 0,
        )  # fmt: skip

    try:
        return run_front(start, server)
    finally:
        spare.discard()


async def listener(hosts: HostsConfig, key: bytes, places: Places, base: EngineConfig, path: Path) -> JoinListener:
    """Return the listener for machines that join."""
    from tokenmill.fleet.host import model_digest
    from tokenmill.fleet.join import JoinListener

    assert hosts.listen is not None
    digest = await asyncio.to_thread(model_digest, base, path)
    tls = (hosts.tls_cert, hosts.tls_key) if hosts.tls_cert is not None and hosts.tls_key is not None else None
    return JoinListener(hosts.listen, key, places, base, digest, tls=tls)


def ray_keepers(cluster: ClusterConfig, joining: JoinListener, places: Places, capacity: int) -> list[FleetKeeper]:
    """Return a keeper that places replicas on a Ray cluster, if the file has one and this machine has no room."""
    if cluster.hosts.ray is None:
        return []
    from tokenmill.fleet.ray_place import RayPlace

    assert cluster.hosts.key_file is not None
    key = cluster.hosts.key_file.read_text(encoding="utf-8").strip()
    place = RayPlace(cluster.hosts.ray, max(1, capacity), joining, key)
    places.add(place)
    return [place]


def run_virtual(cluster: ClusterConfig, planned: Sequence[PlannedGroup], server: ServerConfig) -> int:
    """Start the cluster on simulated devices."""
    from tokenmill.engine.core_client import CoreClient
    from tokenmill.fleet.elastic import start_cluster
    from tokenmill.fleet.places import CountedPlace, Places
    from tokenmill.fleet.virtual import VirtualCoreClient, frontend_without_weights
    from tokenmill.fleet.virtual_blocks import VirtualBlocks
    from tokenmill.planner.topologies import virtual_device

    devices: dict[EngineConfig, VirtualDevice] = {
        one.engine: replace(virtual_device(one.topology.plan), slo=one.engine.scheduler.slo)
        for one in planned
        if one.topology is not None
    }
    first = planned[0].engine
    slots = slots_of(planned)

    async def start() -> AsyncEngine:
        frontend, words = frontend_without_weights(first, devices[first], cluster.load.output_len)

        blocks = VirtualBlocks()

        def make_client(config: EngineConfig) -> CoreClient:
            return VirtualCoreClient(devices[config], words, blocks)

        places = Places(CountedPlace("virtual", len(slots), make_client))
        return await start_cluster(
            frontend, slots, places, allowed(cluster, planned), idle_s=cluster.idle_s,
            num_started=num_needed(planned), roles=roles_of(planned),
            num_kept=cluster.least if cluster.has_roles else 0,
        )  # fmt: skip

    return run_front(start, server)


def in_order(planned: Sequence[PlannedGroup]) -> list[PlannedGroup]:
    """Return the group of each possible replica, in the order in which cores are started: the minimum of every group
    first."""
    least = [one for one in planned for _ in range(one.group.least)]
    return least + [one for one in planned for _ in range(one.num_replicas - one.group.least)]


def slots_of(planned: Sequence[PlannedGroup]) -> list[EngineConfig]:
    return [one.engine for one in in_order(planned)]


def roles_of(planned: Sequence[PlannedGroup]) -> list[Role]:
    slots = in_order(planned)
    return read_roles(",".join(one.group.role for one in slots), len(slots))


def allowed(cluster: ClusterConfig, planned: Sequence[PlannedGroup]) -> ScaleRange:
    from tokenmill.fleet.autoscale import ScaleRange

    most = sum(one.num_replicas for one in planned)
    return ScaleRange(min(cluster.least, most), most)


def num_needed(planned: Sequence[PlannedGroup]) -> int:
    """Return the initial number of replicas."""
    return sum(
        one.group.least if one.topology is None else max(one.topology.num_needed, one.group.least) for one in planned
    )


def run_front(start: StartEngine, server: ServerConfig) -> int:
    from tokenmill.observe.log import configure_logging
    from tokenmill.observe.metrics import Metrics
    from tokenmill.server.run import require_servable, serve

    require_servable(server)
    configure_logging(server.log_level)
    return serve(start, server, Metrics(names=server.metrics_names))
