"""Replicas on the nodes of a Ray cluster: on one machine here, but in processes of their own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.every_kind_of_request import (
    answer,
    assert_same,
    config_of,
    mixed_requests,
    special_requests,
    wait_until,
)
from tests.support.server_process import ROOT, free_port
from tokenmill import AsyncEngine
from tokenmill.config import EngineConfig, OpsConfig, ParallelConfig
from tokenmill.engine.frontend import load_frontend
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.errors import InvalidConfig
from tokenmill.fleet.autoscale import ScaleRange
from tokenmill.fleet.elastic import start_cluster
from tokenmill.fleet.host import model_digest
from tokenmill.fleet.join import JoinListener
from tokenmill.fleet.link import read_key
from tokenmill.fleet.places import Places
from tokenmill.fleet.ray_place import RayPlace, replica_bundles, spread_config, within_nodes

KEY = "a key that is long enough"


def node_cpus(ranks: list[ParallelConfig]) -> Iterator[int]:
    """One processor for each stage's node, as many as it has ranks for a tensor split's; with three replicas only one,
    which the ranks of a split share."""
    for one in ranks:
        yield from [1 if len(ranks) == 3 else one.tp] * one.pp


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch, ranks: list[ParallelConfig]) -> Iterator[Any]:
    """A head without processors, and nodes with room for these replicas."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        cluster.nodes = [cluster.add_node(num_cpus=cpus) for cpus in node_cpus(ranks)]
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the library's own processes and sockets
@pytest.mark.parametrize(
    "ranks",
    [
        [ParallelConfig()] * 3,
        [ParallelConfig(tp=2)] * 2,
        [ParallelConfig(tp=2)] * 3,
        [ParallelConfig(pp=2), ParallelConfig()],
        [ParallelConfig(tp=2, pp=2), ParallelConfig()],
    ],
    ids=["one rank", "tensor split", "tensor split on one processor", "stages", "stages of two ranks"],
)
def test_a_node_that_is_removed_leaves_its_requests_to_others(
    ray_cluster: Any, stories_dir: Path, ranks: list[ParallelConfig]
) -> None:
    """A group of ranks is one replica: of a tensor split on one node, of a pipeline on a node for each stage."""
    config = config_of(stories_dir, speculate="off")
    configs = [replace(config, parallel=one) for one in ranks]
    asked: list[ClientRequest] = [*special_requests(), *mixed_requests(49)]

    async def on_ray() -> list[list[Any]]:
        frontend, places = load_frontend(config), Places()
        digest = model_digest(config, frontend.model_path)
        listener = JoinListener("127.0.0.1:0", read_key(None, KEY), places, config, digest)
        place = RayPlace("auto", len(ranks), listener, KEY)
        places.add(place)
        began_s = time.monotonic()
        engine = await start_cluster(
            frontend, configs, places, ScaleRange(len(ranks), len(ranks)), carriers=[listener, place]
        )
        print(f"up after {time.monotonic() - began_s:.1f} s")
        try:
            assert [one["state"] for one in engine.replicas()] == ["ready"] * len(ranks)
            assert {one["place"] for one in engine.replicas()} == {"ray"}
            answers = [asyncio.create_task(answer(engine, one)) for one in asked]
            await wait_until(lambda: engine.stats().steps > 30)
            remove = partial(ray_cluster.remove_node, ray_cluster.nodes[0], allow_graceful=False)
            removing = asyncio.create_task(asyncio.to_thread(remove))
            rounds = [await asyncio.gather(*answers)]
            while engine.stats().resumed == 0:  # until the node had some of them when it ended
                rounds.append(await asyncio.gather(*(answer(engine, one) for one in asked)))
            await removing
            return rounds
        finally:
            await engine.close()

    rounds = asyncio.run(asyncio.wait_for(on_ray(), 240))
    expected = asyncio.run(here(config, asked))
    for found in rounds:
        assert_same(asked, found, expected)


async def here(config: EngineConfig, asked: list[ClientRequest]) -> list[Any]:
    engine = await AsyncEngine.start(config, in_process=True)
    try:
        return await asyncio.gather(*(answer(engine, one) for one in asked))
    finally:
        await engine.close()


def test_each_stage_is_on_a_node_of_its_own_but_on_gpus() -> None:
    config = EngineConfig(parallel=ParallelConfig(tp=2, pp=3), ops=OpsConfig(threads=4))
    spread = spread_config(config)
    assert spread.parallel.stages_at is not None and replica_bundles(spread) == [{"CPU": 8.0}] * 3
    split = replace(config, parallel=ParallelConfig(tp=2))
    assert spread_config(split) == split and replica_bundles(split) == [{"CPU": 8.0}]
    on_gpus = replace(config, ops=OpsConfig(device="cuda"))
    assert spread_config(on_gpus) == on_gpus and replica_bundles(on_gpus) == [{"CPU": 6.0, "GPU": 6.0}]


def test_no_more_processors_are_asked_for_than_a_node_has() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 2.0}},
        {"Alive": True, "Resources": {"memory": 1.0}},
        {"Alive": False, "Resources": {"CPU": 8.0}},
    ]
    assert within_nodes([{"CPU": 4.0, "GPU": 4.0}], nodes) == [{"CPU": 2.0, "GPU": 4.0}]
    assert within_nodes([{"CPU": 1.0}] * 2, nodes) == [{"CPU": 1.0}] * 2
    assert within_nodes([{"CPU": 4.0}], nodes[1:]) == [{"CPU": 4.0}], "a node may be added yet"


def test_ray_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, stories_dir: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    listener = JoinListener("127.0.0.1:0", read_key(None, KEY), Places(), config_of(stories_dir), "")
    with pytest.raises(InvalidConfig, match="ray is not installed"):
        RayPlace("auto", 1, listener, KEY)


@pytest.mark.parametrize(
    ("address", "problem"),
    [("127.0.0.1:{free}", "can't be reached"), ("nowhere", "no address"), ("127.0.0.1:99999", "no address")],
)
def test_a_cluster_that_is_not_there_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, stories_dir: Path, address: str, problem: str
) -> None:
    """Ray would try for minutes, in a thread that nothing ends."""
    ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=RuntimeError), is_initialized=lambda: False, init=lambda **_: pytest.fail()
    )
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    listener = JoinListener("127.0.0.1:0", read_key(None, KEY), Places(), config_of(stories_dir), "")
    place = RayPlace(address.format(free=free_port()), 1, listener, KEY)
    replicas: Any = None
    with pytest.raises(InvalidConfig, match=problem):
        asyncio.run(place.start(replicas))
