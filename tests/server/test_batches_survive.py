"""A half-done batch outlives its server: kill -9, restart, and every line is answered exactly once."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.applications import Starlette

from tests.support.fake_engine import FakeEngine
from tests.support.server_process import ServerProcess, free_port, running
from tests.support.timing import SOON_S
from tokenmill.config.server import ServerConfig
from tokenmill.observe.metrics import Metrics
from tokenmill.server.app import create_app
from tokenmill.server.batches import table
from tokenmill.server.batches.runner import BatchRunner
from tokenmill.server.batches.table import NewBatch
from tokenmill.server.state.server_state import ServerState

NUM_LINES = 200
CHAT = "/v1/chat/completions"


@contextmanager
def served(script: Path, home: Path) -> Iterator[tuple[ServerProcess, openai.OpenAI]]:
    port = free_port()
    command = ["-m", "tokenmill", "serve", f"scripted:{script}", "--port", str(port), "--max-running", "8"]
    with running(command, port, TOKENMILL_STATE_DIR=str(home)) as process:
        process.wait_for("ready")
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="x", max_retries=0) as client:
            yield process, client


def progress(client: openai.OpenAI, batch_id: str, least: int, within_s: float = 60.0) -> Any:
    deadline = time.monotonic() + within_s
    while (batch := client.batches.retrieve(batch_id)).request_counts.completed < least:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def runner_in(app: Starlette) -> BatchRunner:
    return next(one for one in app.state.context.services if isinstance(one, BatchRunner))


def new_server(folder: Path, delay_s: float = 0.0) -> tuple[BatchRunner, FakeEngine, ServerState]:
    engine = FakeEngine(delay_s=delay_s)
    app = create_app(engine, ServerConfig(state_dir=folder), Metrics())
    return runner_in(app), engine, app.state.context.state


async def until(is_it: Callable[[], Any]) -> None:
    async with asyncio.timeout(SOON_S):
        while not is_it():
            await asyncio.sleep(0.01)


def test_lines_without_an_answer_are_answered_by_the_next_server(tmp_path: Path) -> None:
    """As kill -9 leaves it: nothing was given back, but the lock of the dead server is free."""

    async def work() -> None:
        runner, engine, state = new_server(tmp_path, delay_s=0.01)
        writer = runner.files.writer()
        body = {"model": "fake/tiny", "messages": [{"role": "user", "content": "Hello"}]}
        for n in range(30):
            line = {"custom_id": f"row-{n}", "url": CHAT, "body": {**body, "max_tokens": 1 + n % 7}}
            writer.write(json.dumps(line).encode() + b"\n")
        file = await runner.files.keep(writer, "me", name="n", purpose="batch", expires_s=None)
        facts = {"completion_window": "24h", "metadata": None}
        batch = await runner.add(NewBatch("me", "openai", CHAT, file["id"], 3600.0, facts=facts))
        await until(lambda: len(engine.seen) > 12)
        others, _, other_state = new_server(tmp_path)
        await others.start()
        assert not others._running, "its server lives"
        await others.close()
        await other_state.close()
        runner._watch.cancel()  # type: ignore[union-attr]
        runner._running[batch["id"]].task.cancel()
        await until(lambda: not runner._running)
        half = await state.database.read(lambda connection: table.ended_lines(connection, batch["id"]))
        assert 0 < len(half) < 30
        os.close(state.instance._descriptor)  # type: ignore[arg-type]  # what the system does for a dead process
        await state.database.close()
        runner, engine, state = new_server(tmp_path)
        await runner.start()
        await until(lambda: not runner._running)
        row = await state.database.read(lambda connection: table.find_batch(connection, "me", "openai", batch["id"]))
        assert (row["status"], row["succeeded"], row["errored"]) == ("completed", 30, 0)
        assert len(engine.seen) == 30 - len(half), "only what was not answered is asked again"
        output = runner.files.path(table.facts_of(row)["output_file"]).read_text().splitlines()
        assert sorted(json.loads(one)["custom_id"] for one in output) == sorted(f"row-{n}" for n in range(30))
        await runner.close()
        await state.close()

    asyncio.run(work())


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["kill", "terminate"])
def test_a_half_done_batch_goes_on_after_a_restart(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "model.json"
    script.write_text(json.dumps([{"say": "Number $.", "token_delay_s": 0.005}]))
    body = {"model": "model", "temperature": 0, "messages": [{"role": "user", "content": "go on"}]}
    lines = [
        {"custom_id": f"row-{n}", "method": "POST", "url": "/v1/chat/completions", "body": {**body, "seed": n}}
        for n in range(NUM_LINES)
    ]
    lines[77]["body"] = {**body, "temperature": -1}
    with served(script, tmp_path / "state") as (process, client):
        sent = client.files.create(file="".join(json.dumps(one) + "\n" for one in lines).encode(), purpose="batch")
        batch_id = client.batches.create(
            input_file_id=sent.id, endpoint="/v1/chat/completions", completion_window="24h"
        ).id
        half = progress(client, batch_id, 60)
        assert half.status == "in_progress" and half.request_counts.completed < NUM_LINES - 20
        if ending == "kill":
            process.child.kill()
        else:
            process.terminate()
            asked = time.monotonic()
            assert process.wait() == 0 and time.monotonic() - asked < 30
    with served(script, tmp_path / "state") as (_, client):
        assert client.batches.retrieve(batch_id).request_counts.completed >= half.request_counts.completed
        batch = progress(client, batch_id, NUM_LINES - 1)
        while batch.status != "completed":
            batch = client.batches.retrieve(batch_id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (NUM_LINES - 1, 1)
        answers = [json.loads(one) for one in client.files.content(batch.output_file_id).text.splitlines()]
        errors = [json.loads(one) for one in client.files.content(batch.error_file_id).text.splitlines()]
        assert sorted(one["custom_id"] for one in answers + errors) == sorted(one["custom_id"] for one in lines)
        assert [one["custom_id"] for one in errors] == ["row-77"]
        usage = sum(one["response"]["body"]["usage"]["total_tokens"] for one in answers)
        assert batch.usage.total_tokens == usage
