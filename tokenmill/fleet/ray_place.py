"""Running cores on a Ray cluster: Ray finds a node, starts a host process there and watches it; it transfers no data.

    slot ─► placement group (one bundle: a replica's CPUs and GPUs) ─► actor ─► `tokenmill host --join FRONT` ─► core
                                                                                  └── the link of `link.py` ──► front

Tensor-parallel ranks are on one node (STRICT_PACK), pipeline stages on several (SPREAD), with an actor for each stage;
the stages join the first one's core over TCP (`engine/joined_ranks.py`).

An actor only starts that process and waits for its end. If it dies with its node, Ray reports it, and the core's
requests continue on other cores without waiting for the link's timeout. Ray's own autoscaler may add nodes for waiting
placement groups. The package must be installed on the nodes (`pip install "tokenmill[ray]"`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import random
import secrets
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.engine.core_client import CoreClient, Receive
from tokenmill.engine.core_process import describe_exit
from tokenmill.engine.joined_ranks import KEY_VARIABLE, split_address
from tokenmill.engine.messages import Failed, ToCore
from tokenmill.engine.replicas import Replicas
from tokenmill.errors import InvalidConfig
from tokenmill.fleet.join import HostPlace, JoinListener
from tokenmill.fleet.places import NoCapacity
from tokenmill.observe.log import get_log

log = get_log("fleet")

JOIN_S = 120.0  # from the start of an actor's process until it has joined
PLACE_S = 600.0  # until nodes have the resources
CONNECT_S = 10.0  # until the port of a Ray cluster answers
FOUND_BY_RAY = ("auto",)
ANY_ADDRESS = ("0.0.0.0", "::")
STAGE_PORTS = 20_000, 30_000  # of cores that stages on other nodes join


class HostProcess:
    """A Ray actor that starts a `tokenmill host` process on its node and waits for its end."""

    def __init__(self, url: str, name: str, keys: dict[str, str]) -> None:
        """`keys`: of the cluster and of a group's stages, by the names of their variables."""
        program = ["-m", "tokenmill", "host", "--join", url, "--name", name, "--replicas", "1", "--ends-with-parent"]
        self._child = subprocess.Popen([sys.executable, *program], env={**os.environ, **keys}, stdin=subprocess.DEVNULL)

    def address(self) -> str:
        """Return the address at which other nodes reach this one."""
        ray: Any = importlib.import_module("ray")  # typed where it is installed only
        return str(ray.util.get_node_ip_address())

    def wait(self) -> str:
        """Wait until the process has ended, and return how in words."""
        return describe_exit(self._child.wait())

    def stop(self) -> None:
        self._child.terminate()


class RayCoreClient:
    """A core on some node of a Ray cluster."""

    def __init__(self, place: RayPlace, config: EngineConfig) -> None:
        self._place = place
        self._config = config
        self._name = f"ray-{secrets.token_hex(4)}"
        self._core: CoreClient | None = None
        self._actors: list[Any] = []  # one for each stage that is on a node of its own
        self._group: Any = None
        self._watching: list[asyncio.Task[None]] = []
        self._has_ended = False

    async def start(self, receive: Receive) -> None:
        joined = self._place.listener.expect(self._name)
        try:
            config = spread_config(self._config)
            self._group, self._actors = await asyncio.to_thread(self._place.start_actors, self._name, config)
            self._watching = [asyncio.create_task(self._watch(actor, receive)) for actor in self._actors]
            waits: set[asyncio.Future[Any]] = {joined, *self._watching}
            await asyncio.wait(waits, timeout=JOIN_S, return_when=asyncio.FIRST_COMPLETED)
            if self._has_ended:
                return
            if not joined.done():
                self._end(receive, f"its process did not join within {JOIN_S:.0f} s")
                return
            host: HostPlace = joined.result()
            self._core = host.take(config)
            await self._core.start(lambda message: self._deliver(receive, message))
        except self._place.errors as problem:
            self._end(receive, f"Ray could not start it: {problem}")
        finally:
            self._place.listener.forget(self._name)

    def _deliver(self, receive: Receive, message: Any) -> None:
        if isinstance(message, Failed):
            self._end(receive, message.message, message)
        elif not self._has_ended:
            receive(message)

    def _end(self, receive: Receive, how: str, failure: Failed | None = None) -> None:
        if not self._has_ended:
            self._has_ended = True
            receive(failure or Failed(f"{self._name}: {how}"))

    async def _watch(self, actor: Any, receive: Receive) -> None:
        """Report the end of an actor or of its node."""
        try:
            how = await asyncio.wrap_future(actor.wait.remote().future())
        except self._place.errors as problem:
            how = f"its node or actor has ended ({type(problem).__name__})"
        self._end(receive, how)

    def send(self, message: ToCore) -> None:
        if self._core is not None and not self._has_ended:
            self._core.send(message)

    def silent_s(self) -> float:
        return self._core.silent_s() if self._core is not None else 0.0

    def kill(self) -> None:
        if self._core is not None:
            self._core.kill()

    async def close(self) -> None:
        was_alive, self._has_ended = not self._has_ended, True
        if self._core is not None and was_alive:
            await self._core.close()
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.to_thread(self._place.end_actors, self._group, self._actors)
        self._place.num_taken -= 1


class RayPlace:
    """The nodes of a Ray cluster; a keeper of the engine too."""

    name = "ray"

    def __init__(self, address: str, capacity: int, listener: JoinListener, key: str) -> None:
        """`address`: an address for `ray.init`, or `local` for a cluster on this machine only. `capacity`: the most
        cores."""
        try:
            import ray
        except ImportError:
            raise InvalidConfig("ray is not installed", param="ray", hint='pip install "tokenmill[ray]"') from None
        self.listener = listener
        self.num_taken = 0
        self.errors: tuple[type[Exception], ...] = (ray.exceptions.RayError, ConnectionError, TimeoutError, ValueError)
        self._ray: Any = ray  # typed where it is installed only
        self._address = address
        self._capacity = capacity
        self._key = key
        self._is_own = False

    def num_free(self) -> int:
        return self._capacity - self.num_taken

    def take(self, config: EngineConfig) -> CoreClient:
        if self.num_free() < 1:
            raise NoCapacity
        self.num_taken += 1
        return RayCoreClient(self, config)

    # ── actors; called in threads ──────────────────────────────────────────────────────────────────────

    def start_actors(self, name: str, config: EngineConfig) -> tuple[Any, list[Any]]:
        """Start host processes on nodes with the resources for a replica; return its placement group and actors."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = within_nodes(replica_bundles(config), self._ray.nodes())
        group = placement_group(bundles, strategy="STRICT_PACK" if len(bundles) == 1 else "SPREAD", name=name)
        if not group.wait(PLACE_S):
            self.end_actors(group, [])
            raise TimeoutError(f"no nodes had the resources {bundles} within {PLACE_S:.0f} s")
        hosts: list[Any] = [
            self._ray.remote(HostProcess).options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            )
            for index, bundle in enumerate(bundles)
        ]
        stage_key = {KEY_VARIABLE: secrets.token_hex(16)}
        actors = [hosts[0].remote(self._url(), name, {"TOKENMILL_CLUSTER_KEY": self._key, **stage_key})]
        if config.parallel.stages_at is not None:
            place = self._ray.get(actors[0].address.remote(), timeout=JOIN_S)
            url = f"tcp://{place}:{split_address(config.parallel.stages_at)[1]}"
            actors += [host.remote(url, name, stage_key) for host in hosts[1:]]
        return group, actors

    def end_actors(self, group: Any, actors: Sequence[Any]) -> None:
        from ray.util.placement_group import remove_placement_group

        for actor in actors:
            with contextlib.suppress(*self.errors):
                self._ray.get(actor.stop.remote(), timeout=5)
            with contextlib.suppress(*self.errors):
                self._ray.kill(actor)
        with contextlib.suppress(*self.errors):
            if group is not None:
                remove_placement_group(group)

    def _url(self) -> str:
        host, port = self.listener.address
        util: Any = self._ray.util
        return f"{self.listener.scheme}://{util.get_node_ip_address() if host in ANY_ADDRESS else host}:{port}"

    # ── as the keeper of an engine ─────────────────────────────────────────────────────────────────────

    async def start(self, replicas: Replicas) -> None:
        if self._ray.is_initialized():
            return
        self._is_own = True
        address = None if self._address == "local" else self._address
        errors: tuple[type[Exception], ...] = (OSError, *self.errors)
        try:
            if address is not None and address not in FOUND_BY_RAY:
                await asyncio.wait_for(self._require_cluster(address), CONNECT_S)
            await asyncio.to_thread(self._ray.init, address=address, log_to_driver=False, configure_logging=False)
        except errors as problem:
            raise InvalidConfig(f"the Ray cluster {self._address} can't be reached: {problem}", param="ray") from None

    async def _require_cluster(self, address: str) -> None:
        """Raise what keeps this machine from the cluster's port: Ray itself tries for minutes, and can't be
        interrupted."""
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65_535:
            raise InvalidConfig(f"{address!r} is no address of a Ray cluster", param="ray", hint="auto, or HOST:6379")
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()

    def note_open(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def close(self) -> None:
        if self._is_own:
            await asyncio.to_thread(self._ray.shutdown)

    def set_limits(self, min_replicas: int, max_replicas: int) -> bool:
        return False


def within_nodes(bundles: list[dict[str, float]], nodes: Sequence[Any]) -> list[dict[str, float]]:
    """Return the bundles with at most as many CPUs as the largest node has, which ranks and threads then share;
    otherwise the replica would wait forever."""
    max_cpus = max((node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]), default=0.0)
    if max_cpus <= 0 or all(bundle["CPU"] <= max_cpus for bundle in bundles):
        return bundles
    log.warning(
        "a replica needs %g CPUs, but no node has more than %g: its threads share them", bundles[0]["CPU"], max_cpus
    )
    return [{**bundle, "CPU": min(bundle["CPU"], max_cpus)} for bundle in bundles]


def spread_config(config: EngineConfig) -> EngineConfig:
    """Return the settings of a replica with each pipeline stage on a node of its own, if it has several. Stages on GPUs
    map each other's memory, so they are on one node."""
    if config.parallel.pp == 1 or config.ops.device == "cuda":
        return config
    port = random.randrange(*STAGE_PORTS)  # where it is taken, the core ends, and the next one has another
    return replace(config, parallel=replace(config.parallel, stages_at=f"0.0.0.0:{port}"))


def replica_bundles(config: EngineConfig) -> list[dict[str, float]]:
    """Return the resources that Ray reserves for a replica on each node: a GPU for each rank there, or its threads."""
    parallel = config.parallel
    ranks = parallel.tp if parallel.stages_at is not None else parallel.num_ranks
    if config.ops.device == "cuda":
        bundle = {"CPU": float(ranks), "GPU": float(ranks)}
    else:
        bundle = {"CPU": float((config.ops.threads or 1) * ranks)}
    return [bundle] * (parallel.num_ranks // ranks)
