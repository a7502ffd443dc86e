"""Several models in one server process, each with an engine process of its own, more of them than fit: nothing is
dropped while they are switched, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from tests.support.server_process import ServerProcess, free_port, is_alive, running
from tests.support.timing import eventually
from tokenmill.cli.serve import planned_memory
from tokenmill.config import EngineConfig, ModelConfig
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.startup.spare_core import SpareCore
from tokenmill.planner.memory import CPU_RUNTIME_BYTES
from tokenmill.server.engine_source import EngineSource

NAMES = ("alpha", "beta", "gamma")
ROOM_FOR_TWO_GB = f"{2.5 * CPU_RUNTIME_BYTES / 1e9:.3f}"


def script(folder: Path, name: str) -> str:
    """A model that says its name, slowly."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps([{"say": f"I am {name}.", "token_delay_s": 0.005}]))
    return f"scripted:{file}"


def server_of(*models: str, folder: Path, options: tuple[str, ...]) -> AbstractContextManager[ServerProcess]:
    port, temporary = free_port(), folder / "tmp"
    temporary.mkdir()
    command = ["-m", "tokenmill", "serve", *models, "--port", str(port), "--no-state", *options]
    return running(command, port, TMPDIR=str(temporary), TOKENMILL_HOME=str(folder / "home"))


def ask(process: ServerProcess, name: str) -> str:
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "Who are you?"}],
        "max_tokens": 32,
        "temperature": 0,
    }
    reply = process.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def test_three_models_under_traffic_with_room_for_two(tmp_path: Path) -> None:
    models = [script(tmp_path, name) for name in NAMES]
    with server_of(*models, folder=tmp_path, options=("--model-memory-gb", ROOM_FOR_TWO_GB)) as process:
        process.wait_for("ready")
        assert eventually(lambda: len(process.children()) == 2)  # the first model's engine, and one in reserve
        engine, spare = process.children()
        watched = Watch(process)
        with ThreadPoolExecutor(9) as pool:
            answers = list(pool.map(lambda name: ask(process, name), NAMES * 3))
        assert answers == [f"I am {name}." for name in NAMES] * 3
        most = watched.stop()
        assert most == 3  # two models, and a process that waits for the next
        states = [row["status"]["value"] for row in process.http.get("/models").json()["data"]]
        assert states.count("loaded") == 2 and eventually(lambda: len(process.children()) == 3)
        unloads = re.findall(r'tokenmill_model_unloads_total{model="(\w+)"} (\d+)', process.http.get("/metrics").text)
        assert 1 <= sum(int(count) for _, count in unloads) <= 6  # nine requests, not a load for each
        children = {engine, spare, *process.children()}
        process.terminate()
        assert process.wait() == 0
        assert not any(is_alive(child) for child in children) and not os.listdir(tmp_path / "tmp")
        assert "Traceback" not in process.output()


class Watch:
    """The largest number of engine processes at a time."""

    def __init__(self, process: ServerProcess) -> None:
        self._process, self._most, self._is_over = process, 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(0.05):
            self._most = max(self._most, len(self._process.children()))

    def stop(self) -> int:
        self._is_over.set()
        self._thread.join()
        return self._most


# ── for long ───────────────────────────────────────────────────────────────────────────────────────────


def footprint(pid: int) -> dict[str, int]:
    """What a process holds: open files, threads, resident kilobytes, mapped shared memory."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "kilobytes": int(status["VmRSS"].split()[0]),
        "shared": sum("/dev/shm" in line or "memfd" in line for line in maps),
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_random_switches_leak_nothing(tmp_path: Path, shared_dir: Path) -> None:
    """Real weights for one of the models; a third of the clients leave before they are answered."""
    stories = shared_dir / "goldens" / "stories260K" / "hf"
    models = [str(stories), *(script(tmp_path, name) for name in NAMES[:2])]
    chosen, left = random.Random(50), 0
    with server_of(*models, folder=tmp_path, options=("--max-loaded-models", "1")) as process:
        process.wait_for("ready")
        names = process.http.get("/v1/models").json()["data"]
        names = [row["id"] for row in names]
        said = {name: ask(process, name) for name in names}
        before = footprint(process.child.pid)
        now = names[-1]
        for _ in range(50):
            now = chosen.choice([name for name in names if name != now])
            if chosen.random() < 0.3:
                left += leave_early(process, now)
            assert ask(process, now) == said[now]
            assert len(process.children()) == len(os.listdir(tmp_path / "tmp")) == 2  # one of them waits for a model
        after = footprint(process.child.pid)
        assert left > 5
        assert after["descriptors"] <= before["descriptors"] + 2 and after["threads"] <= before["threads"] + 2
        assert after["shared"] == before["shared"] and after["kilobytes"] < before["kilobytes"] + 20_000
        process.terminate()
        assert process.wait() == 0 and not os.listdir(tmp_path / "tmp")
        assert "Traceback" not in process.output()


def leave_early(process: ServerProcess, name: str) -> bool:
    """Ask, and hang up while the model loads."""
    body = {"model": name, "prompt": "Once upon", "max_tokens": 8}
    try:
        httpx.post(f"{process.url}/v1/completions", json=body, timeout=0.3)
    except httpx.TimeoutException:
        return True
    return False


@pytest.mark.slow
def test_the_plan_of_a_model_is_what_its_engine_holds(shared_dir: Path) -> None:
    """Also over two loads, and found out afterwards of an engine that sized itself."""
    model = ModelConfig(model=str(shared_dir / "goldens" / "stories260K" / "hf"))

    async def work() -> None:
        source = EngineSource(EngineConfig(model), planned_memory, SpareCore())
        described = (await source.read()).info
        memory = source.plan(10**9, 2)
        assert memory.problem is None and memory.total_bytes <= 10**9 and memory.num_blocks
        for _ in range(2):
            engine = await source.start(memory)
            assert isinstance(engine, AsyncEngine) and engine.core.num_blocks == memory.num_blocks
            assert engine.info.max_context == described.max_context
            await engine.close()
        assert source.held().total_bytes == memory.total_bytes
        assert source.plan(CPU_RUNTIME_BYTES, 2).problem is not None

    asyncio.run(work())
