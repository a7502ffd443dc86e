"""Message Batches with the real anthropic package: from creation to results, and everything that may end one early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import anthropic
import pytest

from tests.support.fake_engine import STORY
from tests.support.loopback import RunningServer, Serving
from tests.support.timing import SOON_S, eventually
from tokenmill.config.server import ServerConfig
from tokenmill.server.anthropic import batches
from tokenmill.server.batches import table
from tokenmill.types import BACKGROUND_PRIORITY, ChatRequest

MESSAGE: Any = {"model": "fake/tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


def batch_of(client: anthropic.Anthropic, *params: Any) -> str:
    requests: Any = [{"custom_id": f"n{number}", "params": one} for number, one in enumerate(params)]
    created = client.messages.batches.create(requests=requests)
    assert (created.processing_status, created.request_counts.processing) == ("in_progress", len(params))
    assert created.results_url is None and created.expires_at - created.created_at == timedelta(hours=24)
    return created.id


def ended(client: anthropic.Anthropic, batch_id: str) -> Any:
    deadline = time.monotonic() + SOON_S
    while (batch := client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
    return batch


def num_ended(server: RunningServer, batch_id: str) -> int:
    """Requests of a batch that have ended; clients hear of them when all have."""
    database = server.app.state.context.state.database
    return len(asyncio.run(database.read(lambda connection: table.ended_lines(connection, batch_id))))


def results(client: anthropic.Anthropic, batch_id: str) -> dict[str, Any]:
    return {line.custom_id: line.result for line in client.messages.batches.results(batch_id)}


def test_a_round_trip(claude: anthropic.Anthropic, server: RunningServer) -> None:
    batch_id = batch_of(claude, MESSAGE, {**MESSAGE, "max_tokens": -1}, {**MESSAGE, "model": "nobody's"}, MESSAGE)
    counts = ended(claude, batch_id).request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 2, 2)
    found = results(claude, batch_id)
    assert [found[f"n{number}"].type for number in range(4)] == ["succeeded", "errored", "errored", "succeeded"]
    assert found["n0"].message.content[0].text == STORY and found["n0"].message.usage.output_tokens > 0
    assert found["n1"].error.error.type == "invalid_request_error" and "max_tokens" in found["n1"].error.error.message
    assert found["n2"].error.error.type == "not_found_error"
    request = server.engine.seen[-1]
    assert isinstance(request, ChatRequest) and request.priority == BACKGROUND_PRIORITY, "behind interactive ones"
    assert batch_id in [batch.id for batch in claude.messages.batches.list(limit=2)]
    assert claude.messages.batches.delete(batch_id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.retrieve(batch_id)


def test_tokens_of_batches_are_counted(claude: anthropic.Anthropic, server: RunningServer) -> None:
    def generated() -> float:
        lines = server.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("tokenmill_generation_tokens_total")).split()[-1])

    before = generated()
    ended(claude, batch_of(claude, MESSAGE, MESSAGE))
    assert generated() == before + 2 * len(STORY.split())


def test_a_full_engine_is_waited_for(claude: anthropic.Anthropic, server: RunningServer) -> None:
    server.engine.max_running = 0
    batch_id = batch_of(claude, MESSAGE)
    time.sleep(0.1)
    assert claude.messages.batches.retrieve(batch_id).processing_status == "in_progress"
    with pytest.raises(anthropic.BadRequestError, match="in progress"):
        claude.messages.batches.delete(batch_id)
    with pytest.raises(anthropic.AnthropicError, match="No `results_url`"):
        claude.messages.batches.results(batch_id)
    server.engine.max_running = 10
    assert ended(claude, batch_id).request_counts.succeeded == 1


def test_cancelling_keeps_what_is_done(claude: anthropic.Anthropic, server: RunningServer) -> None:
    server.engine.delay_s = 0.1
    short = {**MESSAGE, "max_tokens": 1}
    batch_id = batch_of(claude, *[short] * 4, *[MESSAGE] * 20)
    assert eventually(lambda: num_ended(server, batch_id) >= 1)
    server.engine.delay_s = 3600.0  # from here on no request ends by itself: only what is given up can end in time
    assert eventually(lambda: bool(server.engine.running))
    assert claude.messages.batches.cancel(batch_id).cancel_initiated_at is not None
    counts = ended(claude, batch_id).request_counts
    assert counts.succeeded >= 1 and counts.canceled >= 1 and counts.succeeded + counts.canceled == 24
    assert {one.type for one in results(claude, batch_id).values()} == {"succeeded", "canceled"}
    assert server.engine.running == {} and server.engine.aborted


def test_what_has_not_run_in_time_expires(
    claude: anthropic.Anthropic, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.engine.max_running = 0
    monkeypatch.setattr(batches, "LIFETIME_S", 0.05)
    requests: Any = [{"custom_id": "late", "params": MESSAGE}]
    batch_id = claude.messages.batches.create(requests=requests).id
    assert ended(claude, batch_id).request_counts.expired == 1
    assert results(claude, batch_id)["late"].type == "expired"


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], "requests is required"),
        ([1], r"requests\[0\] must be an object"),
        ([{"custom_id": "a b", "params": MESSAGE}], r"requests\[0\].custom_id must be 1 to 64"),
        ([{"custom_id": "a"}], r"requests\[0\].params is required"),
        ([{"custom_id": "a", "params": {**MESSAGE, "stream": True}}], "stream is not possible in a batch"),
        ([{"custom_id": "a", "params": MESSAGE}] * 2, r"requests\[1\].custom_id 'a' is repeated"),
    ],
)
def test_wrong_batches_are_refused(claude: anthropic.Anthropic, requests: Any, said: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=said):
        claude.messages.batches.create(requests=requests)


def test_a_batch_belongs_to_its_key(serving: Serving) -> None:
    server = serving(ServerConfig(api_key=("one", "two")))
    with (
        anthropic.Anthropic(base_url=server.url, api_key="one", max_retries=0) as one,
        anthropic.Anthropic(base_url=server.url, api_key="two", max_retries=0) as two,
    ):
        batch_id = batch_of(one, MESSAGE)
        assert ended(one, batch_id).results_url == f"{server.url}/v1/messages/batches/{batch_id}/results"
        assert [batch.id for batch in two.messages.batches.list()] == []
        for refused in (two.messages.batches.retrieve, two.messages.batches.cancel, two.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                refused(batch_id)
