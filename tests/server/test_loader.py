"""Loading and unloading of models: shared loads, eviction of idle ones, keep-alives, failures. Fake engines, real
loader."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.fake_models import DEVICE_BYTES, GB, FakeSource, fake_models
from tokenmill.errors import DamagedFile, Draining
from tokenmill.server import loader as loader_module
from tokenmill.server.errors import LoadFailed
from tokenmill.server.gate import EngineGate
from tokenmill.server.registry import ModelRegistry
from tokenmill.types import PromptRequest


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("POLL_S", 0.001), ("SWEEP_S", 0.01), ("IDLE_WAIT_S", 0.02)):
        monkeypatch.setattr(loader_module, name, value)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 20))


async def ask(gate: EngineGate, number: int = 0) -> str:
    """One request, from the wait for the model to the last word."""
    request = PromptRequest(prompt="Hi", request_id=f"{gate.name}-{number}")
    prepared = await gate.engine.prepare(request)
    return "".join([event.text async for event in gate.engine.submit(prepared)])


def test_all_who_wait_share_one_load_and_one_may_leave() -> None:
    async def work() -> None:
        loader, gates, sources = fake_models("a", "b")
        asked = [asyncio.create_task(ask(gates["a"], number)) for number in range(20)]
        await asyncio.sleep(0.002)
        assert gates["a"].state == "loading" and gates["a"].num_waiting == 20
        asked[0].cancel()  # whoever began the load leaves
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError) and set(answers[1:]) == {FakeEngine().answer}
        assert len(sources["a"].engines) == 1 and not sources["b"].engines and gates["a"].num_waiting == 0
        await loader.close()
        assert sources["a"].num_alive == 0

    run(work)


def test_the_least_recently_used_idle_model_leaves_for_another() -> None:
    async def work() -> None:
        loader, gates, _ = fake_models("a", "b", "c", memory_bytes=2 * GB)
        for name in ("a", "b", "a", "c"):
            await ask(gates[name])
        states = {name: gate.state for name, gate in gates.items()}
        assert states == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert loader.memory() == {"cpu": (2 * GB, 2 * GB)}
        assert gates["b"].info.name == "b" and gates["b"].engine.tokenize("Hi")  # known without being there
        gates["a"].is_pinned = True
        await ask(gates["b"])
        assert gates["a"].state == "loaded" and gates["c"].state == "unloaded"
        await loader.close()

    run(work)


def test_each_device_has_its_own_room() -> None:
    async def work() -> None:
        loader, gates, sources = fake_models("a", "b", "c", "d")
        for name in "abc":
            sources[name].device = "cuda"  # which has room for two
        for name in "abdc":
            await ask(gates[name])
        states = {name: gate.state for name, gate in gates.items()}
        assert states == {"a": "unloaded", "b": "loaded", "c": "loaded", "d": "loaded"}
        assert loader.memory()["cuda"] == (DEVICE_BYTES, 2 * GB) and loader.memory()["cpu"][1] == GB
        await loader.close()

    run(work)


def test_what_runs_is_never_unloaded_and_nobody_starves() -> None:
    async def work() -> None:
        loader, gates, sources = fake_models("a", "b", "c", max_loaded=2)
        for source in sources.values():
            source.delay_s = 0.001
        chosen, most = random.Random(7), 0

        async def client(number: int) -> None:
            nonlocal most
            for turn in range(12):
                name = chosen.choice("aabbc")
                assert await ask(gates[name], number * 100 + turn) == FakeEngine().answer
                most = max(most, sum(source.num_alive for source in sources.values()))

        await asyncio.gather(*(client(number) for number in range(8)))
        assert most <= 2 and all(len(source.engines) > 1 for source in sources.values())
        await loader.close()  # CountedEngine refuses to be closed while it runs
        assert all(source.num_alive == 0 for source in sources.values())

    run(work)


def test_a_failed_load_is_told_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loader, gates, sources = fake_models("a", "b")
        sources["b"].failure = DamagedFile("b.gguf is truncated", hint="pull it again")
        asked = [ask(gates["b"]), ask(gates["b"], 1), ask(gates["a"])]
        first, second, other = await asyncio.gather(*asked, return_exceptions=True)
        for failure in (first, second):
            assert isinstance(failure, LoadFailed) and failure.http_status == 503
            assert "b.gguf is truncated" in failure.message and failure.hint == "pull it again"
        assert other == FakeEngine().answer and gates["b"].state == "failed"
        sources["b"].failure = None
        with pytest.raises(LoadFailed):  # the same answer for a while, without another attempt
            await ask(gates["b"])
        monkeypatch.setattr(loader_module, "RETRY_S", 0.0)
        assert await ask(gates["b"]) == FakeEngine().answer and gates["b"].failure is None
        await loader.close()

    run(work)


def test_what_can_never_fit_is_refused_at_once() -> None:
    async def work() -> None:
        loader, gates, sources = fake_models("a", "b", memory_bytes=3 * GB)
        sources["b"].size = 4 * GB
        await ask(gates["a"])
        with pytest.raises(LoadFailed, match="too large"):
            await ask(gates["b"])
        assert gates["a"].state == "loaded"  # nothing was unloaded for it
        assert sources["b"].offers == [None, 2 * GB, 3 * GB]  # beside all others, then alone
        await loader.close()

    run(work)


@pytest.mark.parametrize(("keep_alive_s", "stays"), [(None, True), (60.0, True), (0.05, False), (0.0, False)])
def test_idle_models_leave_after_their_keep_alive(keep_alive_s: float | None, stays: bool) -> None:
    async def work() -> None:
        loader, gates, sources = fake_models("a", "b")
        sources["a"].delay_s = 0.005  # some twenty words: longer than the keep-alive
        answer = asyncio.create_task(ask(gates["a"]))
        await asyncio.sleep(0)
        gates["a"].keep(keep_alive_s)
        assert await answer == FakeEngine().answer and len(sources["a"].engines) == 1
        deadline = time.monotonic() + (0.2 if stays else 30.0)
        while gates["a"].state == "loaded" and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert (gates["a"].state == "loaded") is stays
        assert await ask(gates["a"]) == FakeEngine().answer
        assert len(sources["a"].engines) == (1 if stays else 2)
        await loader.close()

    run(work)


def test_unloading_waits_for_what_runs_and_new_requests_load_again() -> None:
    async def work() -> None:
        loader, gates, sources = fake_models("a", "b")
        sources["a"].delay_s = 0.005
        running = asyncio.create_task(ask(gates["a"]))
        while not sources["a"].engines or not sources["a"].engines[0].running:
            await asyncio.sleep(0.001)
        leaving = asyncio.create_task(loader.unload(gates["a"]))
        await asyncio.sleep(0.005)
        assert gates["a"].state == "unloading"
        later = asyncio.create_task(ask(gates["a"], 1))
        assert await running == await later == FakeEngine().answer
        await leaving
        assert len(sources["a"].engines) == 2 and sources["a"].num_closed == 1
        await loader.close()

    run(work)


def test_a_model_that_comes_back_does_not_make_the_server_unhealthy() -> None:
    async def work() -> None:
        loader, gates, sources = fake_models("a", "b", max_loaded=1)
        registry = ModelRegistry(*gates.values())
        sources["a"].load_s = 0.05
        first = asyncio.create_task(ask(gates["a"]))
        await asyncio.sleep(0.01)
        assert registry.health().state == "loading"  # the server has not started yet
        await first
        await ask(gates["b"])
        again = asyncio.create_task(ask(gates["a"]))
        await asyncio.sleep(0.03)
        assert gates["a"].state == "loading" and registry.health().state == "ready"
        await again
        await loader.close()

    run(work)


def test_a_server_that_stops_refuses_those_who_wait_for_a_load() -> None:
    async def work() -> None:
        loader, gates, sources = fake_models("a", "b")
        sources["a"].load_s = 10.0
        waiting = asyncio.create_task(ask(gates["a"]))
        await asyncio.sleep(0.01)
        loader.refuse_all()
        with pytest.raises(Draining):
            await waiting
        assert await loader.drain(1.0)
        await loader.close()
        assert not sources["a"].engines

    run(work)


def test_the_only_model_is_not_planned() -> None:
    async def work() -> None:
        loader, gates, sources = fake_models("a")
        await ask(gates["a"])
        assert sources["a"].offers == [] and loader.memory() == {}
        gate, source = EngineGate(name="b"), FakeSource("b")
        loader.add(gate, source)
        await ask(gate)  # a second one comes: now both are counted
        assert loader.memory()["cpu"][1] == 2 * GB
        await loader.close()

    run(work)


def test_fifty_random_switches_leave_nothing_behind() -> None:
    async def work() -> None:
        tasks = asyncio.all_tasks()
        loader, gates, sources = fake_models("a", "b", "c", max_loaded=1)
        chosen = random.Random(3)
        for turn in range(50):
            await ask(gates[chosen.choice("abc")], turn)
            assert sum(source.num_alive for source in sources.values()) == 1
        assert len(asyncio.all_tasks() - tasks) == 1  # the sweep
        await loader.close()
        assert asyncio.all_tasks() == tasks

    run(work)
