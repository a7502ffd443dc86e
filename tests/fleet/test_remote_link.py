"""Cores on another machine, over a link that is slow and cut again and again: nothing is lost, and nobody joins without
the key."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import connect

from tests.support.cores_with_sockets import always_fetch, folder, maker, with_seeds
from tests.support.cut_link import CutLink
from tests.support.every_kind_of_request import (
    STORY,
    answer,
    assert_same,
    config_of,
    mixed_requests,
    special_requests,
    undisturbed_answers,
    wait_until,
)
from tokenmill import AsyncEngine, SamplingParams
from tokenmill.cli import main
from tokenmill.config import EngineConfig
from tokenmill.engine.build import build_core
from tokenmill.engine.core_client import Receive, ThreadCoreClient
from tokenmill.engine.frontend import load_frontend
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.engine.messages import ToCore
from tokenmill.engine.status import EngineStats
from tokenmill.errors import EngineDead, InvalidConfig
from tokenmill.fleet.autoscale import ScaleRange
from tokenmill.fleet.elastic import start_cluster
from tokenmill.fleet.host import HostAgent, model_digest
from tokenmill.fleet.join import JoinListener
from tokenmill.fleet.link import HostInfo, LinkError, ReliableLink, Seal, host_handshake, read_key
from tokenmill.fleet.places import CountedPlace, Places
from tokenmill.types import PromptRequest
from tokenmill.version import VERSION

__all__ = ["always_fetch", "folder"]  # fixtures

KEY = read_key(None, "a key that is long enough")


# ── frames ─────────────────────────────────────────────────────────────────────────────────────────────


class Pipe:
    """One end of a connection in memory, which fails once it was cut."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.other: Pipe | None = None
        self.is_cut = False

    async def send(self, message: bytes) -> None:
        await asyncio.sleep(0)
        if self.is_cut:
            raise OSError("cut")
        assert self.other is not None
        self.other.inbox.put_nowait(message)

    async def recv(self) -> bytes:
        message = None if self.is_cut else await self.inbox.get()
        if message is None:
            raise OSError("cut")
        return message

    async def close(self) -> None:
        for end in (self, self.other):
            assert end is not None
            end.is_cut = True
            end.inbox.put_nowait(None)


def pipes() -> tuple[Pipe, Pipe]:
    one, two = Pipe(), Pipe()
    one.other, two.other = two, one
    return one, two


async def carried(work: Awaitable[None]) -> None:
    try:
        await work
    except* OSError:
        pass


def test_frames_come_once_and_in_order_over_any_number_of_cuts() -> None:
    async def scenario() -> None:
        rng = random.Random(4)
        came: tuple[list[bytes], list[bytes]] = ([], [])
        links = [ReliableLink(came[0].append), ReliableLink(came[1].append)]
        sent: tuple[list[bytes], list[bytes]] = ([], [])
        for number in range(60):
            ends = pipes()
            seals = [Seal(KEY, str(number).encode(), way) for way in (b"a", b"b")]
            numbers = [link.num_received for link in links]
            runs = [
                asyncio.create_task(carried(links[i].run(ends[i], seals[i], seals[1 - i], numbers[1 - i])))
                for i in (0, 1)
            ]
            for _ in range(rng.randrange(0, 50)):
                side, data = rng.randrange(2), rng.randbytes(rng.randrange(1, 30))
                sent[side].append(data)
                links[side].send(data)
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
            for _ in range(rng.randrange(0, 80)):
                await asyncio.sleep(0)
            if number == 59:
                while (len(came[1]), len(came[0])) != (len(sent[0]), len(sent[1])):
                    await asyncio.sleep(0)
            await ends[0].close()
            await asyncio.gather(*runs)
        assert came[1] == sent[0] and came[0] == sent[1]

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("change", ["flip", "repeat", "reflect"])
def test_a_frame_that_somebody_else_made_ends_the_connection(change: str) -> None:
    async def scenario() -> None:
        came: list[bytes] = []
        link = ReliableLink(came.append)
        to_us, from_us = Seal(KEY, b"n", b"to us"), Seal(KEY, b"n", b"from us")
        ours, theirs = pipes()
        run = asyncio.create_task(link.run(ours, from_us, to_us, 0))
        good = to_us.sealed((1).to_bytes(8, "little") + bytes(8) + b"hello")
        await theirs.send(good)
        if change == "flip":
            await theirs.send(to_us.sealed((2).to_bytes(8, "little") + bytes(8) + b"mean")[:-1] + b"X")
        elif change == "reflect":
            link.send(b"ours")
            await theirs.send(await theirs.recv())
        else:
            await theirs.send(good)
            await asyncio.sleep(0.05)
            await theirs.close()
        with pytest.raises(ExceptionGroup) as raised:
            await run
        assert came == [b"hello"], "nothing else was taken"
        assert raised.group_contains(OSError if change == "repeat" else LinkError)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_keys_are_needed_and_not_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("", "short"):
        with pytest.raises(InvalidConfig, match="key"):
            read_key(None, text)
    with pytest.raises(InvalidConfig, match="can't be read"):
        read_key(tmp_path / "none", None)
    assert main(["host", "--join", "ws://127.0.0.1:1"]) == 2
    assert "needs a key" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["nonsense", "http://front:1", "ws://", "ws://front:99999", "ws://front:x", "ws://[::1"]
)
def test_what_is_no_address_of_a_front_is_told(address: str) -> None:
    info = HostInfo("host", 1, "test", VERSION)
    with pytest.raises(InvalidConfig) as refusal:
        HostAgent(address, KEY, info, lambda config, _: config)
    assert refusal.value.param == "join"


# ── machines ───────────────────────────────────────────────────────────────────────────────────────────


class Cluster:
    """A front, and machines that join it: all in this process but the cores."""

    def __init__(self, config: EngineConfig, num_replicas: int) -> None:
        self.config = config
        self.frontend = load_frontend(config)
        self.num_replicas = num_replicas
        self.places = Places()
        digest = model_digest(config, self.frontend.model_path)
        self.listener = JoinListener("127.0.0.1:0", KEY, self.places, config, digest, away_s=30.0)
        self.agents: list[asyncio.Task[None]] = []

    async def listen(self) -> int:
        """Let machines join before the engine opens; the port."""
        await self.listener.listen()
        return self.listener.address[1]

    def join(self, port: int, *, key: bytes = KEY, version: str = VERSION, seats: int = 1) -> asyncio.Task[None]:
        info = HostInfo(f"host {len(self.agents)}", seats, "test", version)
        agent = HostAgent(f"ws://127.0.0.1:{port}", key, info, lambda config, _: config)
        self.agents.append(asyncio.create_task(agent.run()))
        return self.agents[-1]

    async def engine(self) -> AsyncEngine:
        allowed = ScaleRange(self.num_replicas, self.num_replicas)
        slots = [self.config] * self.num_replicas
        return await start_cluster(self.frontend, slots, self.places, allowed, carriers=[self.listener])

    async def close(self) -> None:
        for agent in self.agents:
            agent.cancel()
        await asyncio.gather(*self.agents, return_exceptions=True)
        await self.listener.close()


@pytest.mark.parametrize(
    ("delay_s", "num_cuts", "num_mixed"),
    [(0.01, 4, 4), pytest.param(0.05, 20, 60, marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_answers_over_a_link_that_is_cut_are_the_same(
    stories_dir: Path, delay_s: float, num_cuts: int, num_mixed: int
) -> None:
    config = config_of(stories_dir)
    asked = [*special_requests(), *mixed_requests(num_mixed)]

    async def over_link() -> tuple[list[Any], CutLink]:
        cluster = Cluster(config, 1)
        there = CutLink(await cluster.listen(), delay_s=delay_s, cut_bytes=6000, num_cuts=num_cuts)
        cluster.join(await there.open())
        engine = await cluster.engine()
        try:
            found = await asyncio.gather(*(answer(engine, one) for one in asked))
            stats = engine.stats()
            assert stats.restarts == 0 and stats.resumed == 0, "the link itself has lost nothing"
            assert engine.replicas()[0]["place"] == "host 0"
            return found, there
        finally:
            await engine.close()
            await cluster.close()
            await there.close()

    found, there = asyncio.run(asyncio.wait_for(over_link(), 240))
    assert there.num_cuts == num_cuts
    assert STORY.encode() not in there.seen, "token ids only, no text"
    assert_same(asked, found, asyncio.run(undisturbed_answers(config, asked)))


def test_who_does_not_know_the_key_or_runs_another_version_is_refused(stories_dir: Path) -> None:
    async def scenario() -> None:
        cluster = Cluster(config_of(stories_dir), 1)
        port = await cluster.listen()
        for joined in (
            cluster.join(port, key=read_key(None, "another key, as long")),
            cluster.join(port, version="0.0.0"),
        ):
            with pytest.raises(LinkError, match="refuses this machine"):
                await asyncio.wait_for(joined, 30)
        assert cluster.places.num_free() == 0
        await cluster.close()

    asyncio.run(scenario())


def test_a_machine_that_reconnects_before_its_cut_is_noticed_counts_once(stories_dir: Path) -> None:
    async def scenario() -> None:
        cluster = Cluster(config_of(stories_dir), 1)
        url, info = f"ws://127.0.0.1:{await cluster.listen()}", HostInfo("host", 2, "test", VERSION)
        async with connect(url) as first, connect(url) as second:
            await host_handshake(first, KEY, info, "session", 0)
            await wait_until(lambda: cluster.places.num_free() == 2)
            place = cluster.listener._hosts["session"]
            earlier = place.connection
            await host_handshake(second, KEY, info, "session", 0)
            await wait_until(lambda: place.connection not in (None, earlier))
            assert cluster.places.num_free() == 2
        await cluster.close()

    asyncio.run(scenario())


def test_a_machine_with_another_model_is_told(stories_dir: Path) -> None:
    async def scenario() -> None:
        cluster = Cluster(config_of(stories_dir), 1)
        port = await cluster.listen()
        cluster.listener._digest = "other"
        cluster.join(port)
        with pytest.raises(EngineDead, match="differs from the front"):
            await cluster.engine()
        await cluster.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))


@pytest.mark.slow
def test_a_machine_that_is_gone_leaves_its_requests_to_another(stories_dir: Path) -> None:
    config = config_of(stories_dir)
    asked: list[ClientRequest] = [*special_requests(), *mixed_requests(20)]

    async def scenario() -> list[Any]:
        cluster = Cluster(config, 2)
        cluster.listener._away_s = 0.5
        port = await cluster.listen()
        there = CutLink(port, delay_s=0.0, cut_bytes=1 << 40, num_cuts=0)
        cluster.join(await there.open())
        cluster.join(port)
        await wait_until(lambda: cluster.places.num_free() == 2)
        engine = await cluster.engine()
        await wait_until(lambda: sum(one["state"] == "ready" for one in engine.replicas()) == 2)
        answers = [asyncio.create_task(answer(engine, one)) for one in asked]
        await wait_until(lambda: engine.stats().steps > 20)
        await there.close()
        try:
            found = await asyncio.gather(*answers)
            assert engine.stats().resumed > 0
            return found
        finally:
            await engine.close()
            await cluster.close()

    found = asyncio.run(asyncio.wait_for(scenario(), 240))
    assert_same(asked, found, asyncio.run(undisturbed_answers(config, asked)))


@pytest.mark.parametrize("way", ["ends", "starts anew"])
def test_a_machine_that_ends_is_not_waited_for(stories_dir: Path, way: str) -> None:
    """Neither one that is told to end, nor one whose process is killed and started again."""

    async def scenario() -> None:
        cluster = Cluster(config_of(stories_dir), 1)
        port = await cluster.listen()
        there = CutLink(port, delay_s=0.0, cut_bytes=1 << 40, num_cuts=0)
        first = cluster.join(await there.open())
        await wait_until(lambda: cluster.places.num_free() == 1)
        (place,) = cluster.listener._hosts.values()
        if way == "ends":
            first.cancel()
        else:
            await there.close()
            await wait_until(lambda: place.away is not None)
            info = HostInfo(place.name, 1, "test", VERSION)
            agent = HostAgent(f"ws://127.0.0.1:{port}", KEY, info, lambda config, _: config)
            cluster.agents.append(asyncio.create_task(agent.run()))
        await wait_until(lambda: place not in cluster.listener._hosts.values())
        assert place.away is None or place.away.cancelled(), "its time is not over yet"
        await wait_until(lambda: cluster.places.num_free() == (0 if way == "ends" else 1))
        await cluster.close()
        if way == "ends":
            await there.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


# ── blocks between machines ────────────────────────────────────────────────────────────────────────────


class ThreadOnHost(ThreadCoreClient):
    """A host's core in a thread, so that tests reach into it."""

    num_started = 0

    def __init__(self, config: EngineConfig, path: Path, forward: Callable[[bytes], None], folder: Path) -> None:
        ThreadOnHost.num_started += 1
        self.block_address = str(folder / f"core {ThreadOnHost.num_started}")
        super().__init__(lambda: build_core(config, path, block_address=self.block_address))
        self._forward = forward

    async def start(self, receive: Receive) -> None:
        await super().start(lambda message: self._forward(msgspec.msgpack.encode(message)))

    def send_encoded(self, data: bytes) -> None:
        self.send(msgspec.msgpack.decode(data, type=ToCore))


@pytest.mark.parametrize("way", ["between two hosts", "between a host and the front", "over a link that is cut"])
def test_streams_move_to_another_machine_with_their_blocks(
    way: str, stories_dir: Path, folder: Path, always_fetch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To and fro: what is asked for goes through the links, and nearly nothing is computed again."""
    monkeypatch.setattr("tokenmill.fleet.host.RelayedCoreClient", partial(ThreadOnHost, folder=folder))
    config = config_of(stories_dir, speculate="off")
    params = SamplingParams(temperature=1.0, max_tokens=300, ignore_eos=True)
    asked: list[ClientRequest] = with_seeds(
        [PromptRequest(prompt=[1, *range(20 + n, 190 + n)], params=params, request_id=f"stream {n}") for n in range(4)]
    )

    async def scenario() -> tuple[list[Any], EngineStats]:
        cluster = Cluster(config, 2)
        port = await cluster.listen()
        there = CutLink(port, delay_s=0.0, cut_bytes=20_000, num_cuts=6 if way == "over a link that is cut" else 0)
        cluster.join(await there.open())
        if way == "between a host and the front":
            make = maker(cluster.frontend, folder, 1)
            cluster.places.add(CountedPlace("here", 1, lambda _: make()))
        else:
            cluster.join(port)
        await wait_until(lambda: cluster.places.num_free() == 2)
        engine = await cluster.engine()
        try:
            await wait_until(lambda: sum(one["state"] == "ready" for one in engine.replicas()) == 2)
            engine.drain_replica(1)
            answers = [asyncio.create_task(answer(engine, one)) for one in asked]
            for turn in range(4):
                for one, answered in zip(asked, answers, strict=True):
                    while not answered.done() and engine.num_generated(one.request_id or "") < 10 * (turn + 1):
                        await asyncio.sleep(0.001)
                engine.drain_replica(1 - turn % 2, False)
                engine.drain_replica(turn % 2)
                while engine.replicas()[turn % 2]["requests"]:
                    await asyncio.sleep(0.001)
            return await asyncio.gather(*answers), engine.stats()
        finally:
            await engine.close()
            await cluster.close()
            await there.close()

    found, stats = asyncio.run(asyncio.wait_for(scenario(), 240))
    assert_same(asked, found, asyncio.run(undisturbed_answers(config, asked)))
    is_fetched = stats.fetched_tokens >= 160  # a prompt's blocks at least, unless all had ended before they were moved
    assert way == "over a link that is cut" or is_fetched or not stats.resumed


def test_settings_travel_whole(stories_dir: Path) -> None:
    config = config_of(stories_dir)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
