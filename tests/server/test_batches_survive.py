"""A half-done batch outlives its server: kill -9, restart, and every line is answered exactly once."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.server_process import ServerProcess, free_port, running

NUM_LINES = 200


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


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["kill", "terminate"])
def test_a_half_done_batch_goes_on_after_a_restart(tmp_path: Path, ending: str) -> None:
    assert sys.executable
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
            assert process.wait() == 0 and time.monotonic() - asked < 10
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
