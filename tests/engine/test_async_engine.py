"""The serving front over a thread and over a process of its own: streams, aborts, draining, death and return."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import tokenmill
from tokenmill import AsyncEngine, SamplingParams
from tokenmill.config import EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.engine import core_supervisor, text_workers
from tokenmill.engine.core_client import CoreClient, ProcessCoreClient
from tokenmill.engine.core_process import FOLDER_PREFIX, CoreProcess, python_command
from tokenmill.engine.frontend import load_frontend
from tokenmill.engine.input_processor import ClientRequest, InputProcessor
from tokenmill.engine.messages import Abort
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.errors import (
    ContextLengthExceeded,
    Draining,
    EngineDead,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    TokenmillError,
)
from tokenmill.types import Event, PromptRequest, Request, SequenceOutput, Tenant

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
BOTH = pytest.mark.parametrize("in_process", [True, False], ids=["thread", "process"])


@asynccontextmanager
async def running(stories: Path, in_process: bool, **scheduler: Any) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        ModelConfig(model=str(stories)), scheduler=SchedulerConfig(**scheduler), ops=OpsConfig(threads=1)
    )
    engine = await AsyncEngine.start(config, in_process=in_process)
    try:
        yield engine
    finally:
        await engine.close()


def story(params: SamplingParams, request_id: str = "") -> PromptRequest:
    return PromptRequest(prompt="Once upon a time", params=params, request_id=request_id)


async def text_of(engine: AsyncEngine, asked: PromptRequest) -> str:
    return "".join([event.text async for event in engine.submit(asked)])


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "waited too long"
        await asyncio.sleep(0.02)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


@BOTH
def test_many_at_once_answer_as_one_alone(stories_dir: Path, in_process: bool) -> None:
    async def scenario() -> None:
        async with running(stories_dir, in_process) as engine:
            params = SamplingParams(temperature=0.8, seed=5, max_tokens=30)
            alone = await text_of(engine, story(params))
            assert await asyncio.gather(*(text_of(engine, story(params)) for _ in range(12))) == [alone] * 12
            assert engine.health().state == "ready"

    run(scenario())


def test_a_mistake_in_one_answer_s_text_ends_that_one_alone(stories_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = OutputProcessor.process

    def processed(processor: OutputProcessor, output: SequenceOutput) -> list[Event]:
        if processor.request_id == "unlucky":
            raise ValueError("a mistake")
        return process(processor, output)

    monkeypatch.setattr(OutputProcessor, "process", processed)

    async def scenario() -> None:
        async with running(stories_dir, in_process=True) as engine:
            unlucky = asyncio.create_task(text_of(engine, story(LONG, "unlucky")))
            assert await text_of(engine, story(SamplingParams(temperature=0, max_tokens=8)))
            with pytest.raises(RequestFailed):
                await unlucky
            await until(lambda: engine.stats().running == 0)

    run(scenario())


@BOTH
def test_leaving_early_frees_everything(stories_dir: Path, in_process: bool) -> None:
    async def scenario() -> None:
        async with running(stories_dir, in_process) as engine:
            streams = [engine.submit(story(LONG)) for _ in range(4)]
            for stream in streams[:3]:
                await anext(stream)
            await streams[0].aclose()
            task = asyncio.create_task(collect(streams[1]))
            await asyncio.sleep(0)
            task.cancel()
            await engine.abort(streams[2].request_id)
            await streams[3].aclose()  # never read from
            async for _ in engine.submit(story(LONG, "left")):
                break
            await asyncio.sleep(0)
            await engine.submit(story(LONG, "left")).aclose()  # its name is free again at once
            await text_of(engine, story(SamplingParams(max_tokens=2)))
            await until(lambda: engine.stats().running == 0 and engine.stats().kv_blocks_used == 0)
            with pytest.raises(TokenmillError, match="aborted"):
                await collect(streams[2])

    run(scenario())


async def collect(stream: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in stream]


@BOTH
def test_draining_finishes_what_runs_and_refuses_the_rest(stories_dir: Path, in_process: bool) -> None:
    async def scenario() -> None:
        async with running(stories_dir, in_process) as engine:
            stream = engine.submit(story(SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)))
            drained = asyncio.create_task(engine.drain(30))
            await asyncio.sleep(0)
            with pytest.raises(Draining):
                engine.submit(story(LONG))
            events = await collect(stream)
            assert events[-1].finish_reason == "length" and events[-1].usage is not None
            assert events[-1].usage.completion_tokens == 50
            assert await drained

    run(scenario())


def test_a_full_engine_refuses(stories_dir: Path) -> None:
    """Two run, two wait; those that a step will admit at once are not counted as waiting."""

    async def scenario() -> None:
        async with running(stories_dir, in_process=True, max_running=2, max_waiting=2) as engine:
            streams = [engine.submit(story(LONG)) for _ in range(4)]
            for refused in (engine.submit, engine.prepare):
                with pytest.raises(Overloaded):
                    await resolved(refused(story(LONG)))
            await streams[0].aclose()
            assert await text_of(engine, story(SamplingParams(max_tokens=2)))

    run(scenario())


def test_one_tenant_does_not_take_the_places_of_all(stories_dir: Path) -> None:
    def of(tenant: str) -> PromptRequest:
        return structs.replace(story(LONG), tenant=Tenant(id=tenant))

    async def scenario() -> None:
        async with running(stories_dir, in_process=True, max_running=2, max_waiting=4) as engine:
            flood = [engine.submit(of("flood")) for _ in range(6)]
            with pytest.raises(Overloaded):
                engine.submit(of("flood"))
            polite = [engine.submit(await engine.prepare(of("polite"))) for _ in range(3)]  # half of the places
            third = [engine.submit(of("third")) for _ in range(2)]
            for tenant in ("flood", "polite", "third"):
                for refused in (engine.submit, engine.prepare):
                    with pytest.raises(Overloaded):
                        await resolved(refused(of(tenant)))
            for stream in (*flood, *third):
                await stream.aclose()
            polite += [engine.submit(of("polite")) for _ in range(3)]  # the others are gone: it has all places
            with pytest.raises(Overloaded):
                engine.submit(of("polite"))
            for stream in polite:
                await stream.aclose()
            assert engine.is_idle()

    run(scenario())


async def resolved(result: Any) -> Any:
    return await result if asyncio.iscoroutine(result) else result


class SlowTokenizer:
    """Holds up a thread that tokenises until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.threads: set[int] = set()
        process = InputProcessor.process

        def slow(processor: InputProcessor, asked: ClientRequest) -> Request:
            self.threads.add(threading.get_ident())
            if isinstance(asked, PromptRequest) and len(asked.prompt) > text_workers.LONG_CHARACTERS:
                self.has_begun.set()
                assert self.may_end.wait(60)
            return process(processor, asked)

        monkeypatch.setattr(InputProcessor, "process", slow)


def test_a_long_prompt_is_prepared_in_a_thread_beside_streams(
    stories_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowTokenizer(monkeypatch)
    too_long = PromptRequest(prompt="word " * 4000)

    async def scenario() -> None:
        async with running(stories_dir, in_process=True) as engine:
            preparing = asyncio.create_task(engine.prepare(too_long))
            await until(slow.has_begun.is_set)
            assert await text_of(engine, story(SamplingParams(max_tokens=5))), "streams go on meanwhile"
            short = await engine.prepare(story(SamplingParams(max_tokens=5)))
            assert [event.text async for event in engine.submit(short)]
            slow.may_end.set()
            with pytest.raises(ContextLengthExceeded):
                await preparing
            assert len(slow.threads) == 2, "short prompts stay on the event loop's thread"

    run(scenario())


def test_leaving_while_a_prompt_is_prepared_submits_nothing(stories_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowTokenizer(monkeypatch)
    monkeypatch.setattr(text_workers, "LONG_CHARACTERS", 8)

    async def scenario() -> None:
        async with running(stories_dir, in_process=True, max_running=2, max_waiting=2) as engine:
            leaving = [asyncio.create_task(engine.prepare(story(LONG))) for _ in range(4)]
            await until(slow.has_begun.is_set)
            with pytest.raises(Overloaded):  # prompts that are being prepared count
                engine.submit(PromptRequest(prompt=[1]))
            for task in leaving:
                task.cancel()
            assert all(
                isinstance(one, asyncio.CancelledError)
                for one in await asyncio.gather(*leaving, return_exceptions=True)
            )
            slow.may_end.set()
            assert await text_of(engine, PromptRequest(prompt=[1], params=SamplingParams(max_tokens=5)))
            await until(lambda: engine.stats().running == 0)

    run(scenario())


def test_a_killed_core_comes_back_and_its_requests_go_on(stories_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_supervisor, "FIRST_RESTART_DELAY_S", 0.01)
    monkeypatch.setattr(core_supervisor, "MAX_RESTART_DELAY_S", 0.02)
    tries = iter([None, *[OSError(errno.EMFILE, "no descriptors")] * 8, None])
    config = EngineConfig(ModelConfig(model=str(stories_dir)), ops=OpsConfig(threads=1))

    def make_client() -> CoreClient:
        if (problem := next(tries)) is not None:  # for a while there is nothing to start a process with
            raise problem
        return ProcessCoreClient(config, stories_dir)

    async def scenario() -> None:
        engine = AsyncEngine(load_frontend(config), make_client)
        await engine.open()
        try:
            before = await text_of(engine, story(LONG))
            stream = engine.submit(story(LONG))
            first, pid = await anext(stream), engine.core.pid
            os.kill(pid, signal.SIGKILL)
            await until(lambda: engine.health().state != "ready")
            with pytest.raises(EngineDead):
                engine.submit(story(LONG))
            assert first.text + "".join([event.text for event in await collect(stream)]) == before
            assert engine.core.pid != pid and engine.stats().restarts == 1
            assert await text_of(engine, story(LONG)) == before
        finally:
            await engine.close()

    run(scenario())


def test_a_core_that_keeps_dying_is_given_up_and_that_is_said(
    stories_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core_supervisor, "MAX_RESTARTS", 0)

    async def scenario() -> None:
        async with running(stories_dir, in_process=False) as engine:
            os.kill(engine.core.pid, signal.SIGKILL)
            await until(lambda: "died 1 times" in engine.health().detail)
            assert engine.health().is_given_up
            with pytest.raises(EngineDead, match="died 1 times"):
                engine.submit(story(LONG))

    run(scenario())
    assert "SIGKILL" in caplog.text and "it is not restarted" in caplog.text and "; restarting it" not in caplog.text


def test_a_core_ends_with_its_front(stories_dir: Path) -> None:
    async def scenario() -> None:
        async with running(stories_dir, in_process=False) as engine:
            pid = engine.core.pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(scenario())


def test_what_is_wrong_is_said_before_the_first_event(stories_dir: Path) -> None:
    async def scenario() -> None:
        async with running(stories_dir, in_process=True) as engine:
            with pytest.raises(InvalidRequest, match="not a token id"):
                engine.submit(PromptRequest(prompt=[99_999]))
            engine.submit(story(LONG, request_id="same"))
            with pytest.raises(InvalidRequest, match="in use"):
                engine.submit(story(LONG, request_id="same"))

    run(scenario())


def test_a_model_that_cannot_be_loaded_is_a_clear_error(tmp_path: Path, stories_dir: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((stories_dir / name).read_bytes())
    whole = (stories_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])

    async def scenario() -> None:
        with pytest.raises(EngineDead, match=r"model\.safetensors"):
            async with running(tmp_path, in_process=False):
                pass

    run(scenario())


def test_what_a_core_says_last_is_heard_before_its_end(
    tmp_path: Path, stories_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both lie there when the front looks up again, as on a machine that has other things to do (and one whose
    folder for what is temporary lies too deep for a socket)."""
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    (tmp_path / "config.json").write_bytes((stories_dir / "config.json").read_bytes())
    heard: list[Any] = []

    async def scenario() -> None:
        child = CoreProcess()
        link = ProcessCoreClient(EngineConfig(ModelConfig(model=str(tmp_path))), tmp_path, child)
        await link.start(heard.append)
        await asyncio.sleep(0.1)
        child.wait()  # the loop stands still meanwhile
        await until(lambda: any("ended" in message.message for message in heard))
        await link.close()

    run(scenario())
    assert "safetensors" in heard[0].message, heard


def test_a_core_that_still_loads_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during a start: it reads no messages before it is loaded."""
    monkeypatch.setattr("tokenmill.engine.core_process.EXIT_TIMEOUT_S", 3600.0)

    async def scenario() -> None:
        loading = CoreProcess(program=("-c", "import time; time.sleep(3600)"))
        link = ProcessCoreClient(EngineConfig(ModelConfig(model=str(tmp_path))), tmp_path, loading)
        await link.start(lambda message: None)
        await link.close()

    run(scenario())


def test_a_close_that_is_cancelled_still_ends_the_core(tmp_path: Path) -> None:
    """A second stop while the first one is carried out, on a machine whose threads are slow to start."""
    core = CoreProcess(program=("-c", "import time; time.sleep(20)"))
    link = ProcessCoreClient(EngineConfig(ModelConfig(model=str(tmp_path))), tmp_path, core)

    async def scenario() -> None:
        executor, gate = ThreadPoolExecutor(2), threading.Event()
        asyncio.get_running_loop().set_default_executor(executor)
        await link.start(lambda message: None)
        await asyncio.sleep(0)  # its end is being watched now, by one of the threads
        busy = asyncio.create_task(asyncio.to_thread(gate.wait))
        await asyncio.sleep(0)
        closing = asyncio.create_task(link.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        gate.set()
        await busy

    asyncio.run(scenario())
    assert core.has_ended() and not Path(core.folder).exists()


def test_a_program_ends_that_never_closed_its_engine(tmp_path: Path) -> None:
    """An exception on the way, or a forgotten `close`: the loop's end is the core's."""
    core = CoreProcess(program=("-c", "import time; time.sleep(3600)"))
    link = ProcessCoreClient(EngineConfig(ModelConfig(model=str(tmp_path))), tmp_path, core)

    async def scenario() -> None:
        await link.start(lambda message: None)
        await asyncio.sleep(0)  # its end is being watched now

    asyncio.run(scenario())
    assert core.wait() == "signal SIGKILL" and not Path(core.folder).exists()
    link.send(Abort("a request of a task that ended with the loop"))
    asyncio.run(link.close())  # later than never


def test_a_core_imports_nothing_from_where_the_user_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zmq.py").write_text("raise SystemExit(3)")
    monkeypatch.delenv("PYTHONPATH", raising=False)  # which may name the folder one stands in
    monkeypatch.chdir(tmp_path)
    core = CoreProcess(program=("-c", "import zmq"))
    assert core.wait() == "exit code 0"
    core.stop()
    monkeypatch.chdir(Path(tokenmill.__file__).parents[1])  # `python -m tokenmill` in a source tree
    assert python_command() == [sys.executable]


def test_a_core_that_dies_while_no_descriptor_is_free_comes_back(
    stories_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead one's folder can't be removed then, and none be made for the next."""
    opened = os.open

    def exhausted(path: Any, *rest: Any, **more: Any) -> int:
        if FOLDER_PREFIX in str(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, *rest, **more)

    async def scenario() -> None:
        async with running(stories_dir, in_process=False) as engine:
            pid = engine.core.pid
            with monkeypatch.context() as full:
                full.setattr(os, "open", exhausted)
                os.kill(pid, signal.SIGKILL)
                await until(lambda: "Too many open files" in engine.health().detail)
            await until(lambda: engine.health().state == "ready" and engine.core.pid != pid)
            assert await text_of(engine, story(LONG))

    run(scenario())
