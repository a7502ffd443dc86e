"""OpenAI's Batches with the real openai package: life, files, counts, and everything that may end one early."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.fake_engine import INFO, STORY, FakeEngine
from tests.support.loopback import RunningServer, Serving
from tests.support.timing import SOON_S, eventually
from tokenmill.config.server import ServerConfig
from tokenmill.server.batches import lines as lines_module
from tokenmill.server.batches import table
from tokenmill.server.batches.runner import BatchRunner
from tokenmill.server.batches.width import BatchWidth
from tokenmill.server.gate import EngineGate
from tokenmill.server.keys import KeyRecord, KeyRing, new_key, write_keys
from tokenmill.types import BACKGROUND_PRIORITY, ChatRequest

CHAT = "/v1/chat/completions"
BODY = {"model": "fake/tiny", "messages": [{"role": "user", "content": "Hello"}]}


def line(custom_id: object, body: Any = BODY, url: str = CHAT, **extra: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **extra}


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    content = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines)
    return client.files.create(file=("lines.jsonl", content.encode()), purpose="batch").id


def batch_of(client: openai.OpenAI, lines: list[Any], endpoint: Any = CHAT, **extra: Any) -> Any:
    file_id = upload(client, lines)
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h", **extra)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    return when(client, batch_id, lambda b: b.status in ("failed", "completed", "expired", "cancelled"))


def when(client: openai.OpenAI, batch_id: str, is_it: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + SOON_S
    while not is_it(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    found = [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


def test_a_batch_from_its_file_to_its_results(client: openai.OpenAI, server: RunningServer) -> None:
    lines = [line("a"), line("b", {**BODY, "temperature": 9}), line("c"), line("d", {**BODY, "max_tokens": 2})]
    created = batch_of(client, lines, metadata={"job": "nightly"})
    assert created.status in ("validating", "in_progress") and created.metadata == {"job": "nightly"}
    assert created.expires_at is not None and created.expires_at - created.created_at == 86_400
    batch = ended(client, created.id)
    assert batch.status == "completed" and batch.model == "fake/tiny" and batch.errors is None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (4, 3, 1)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert set(answers) == {"a", "c", "d"} and set(errors) == {"b"}
    reply = answers["a"]["response"]
    assert reply["status_code"] == 200 and reply["body"]["choices"][0]["message"]["content"] == STORY
    assert reply["request_id"] and answers["a"]["error"] is None and answers["a"]["id"].startswith("batch_req_")
    assert errors["b"]["response"]["status_code"] == 400
    assert errors["b"]["response"]["body"]["error"]["param"] == "temperature"
    usages = [one["response"]["body"]["usage"] for one in answers.values()]
    assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in usages)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages) > 0
    request = server.engine.seen[-1]
    assert isinstance(request, ChatRequest) and request.priority == BACKGROUND_PRIORITY, "behind interactive ones"
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert created.id in [one.id for one in client.batches.list(limit=5)]


@pytest.mark.parametrize(
    ("endpoint", "body", "where"),
    [
        ("/v1/completions", {"model": "fake/tiny", "prompt": "Hi"}, "choices"),
        ("/v1/embeddings", {"model": "fake/tiny", "input": ["Hi"]}, "data"),
        ("/v1/messages", {**BODY, "max_tokens": 9}, "content"),
        ("/v1/responses", {"model": "fake/tiny", "input": "Hi", "store": False}, "output"),
    ],
)
def test_other_endpoints(client: openai.OpenAI, endpoint: str, body: Any, where: str) -> None:
    wrong = line(
        "wrong", {**body, "model": "fake/tiny", "prompt": 7, "input": 7, "max_tokens": -1, "background": True}, endpoint
    )
    batch = ended(client, batch_of(client, [line("one", body, endpoint), wrong], endpoint).id)
    assert results(client, batch.output_file_id)["one"]["response"]["body"][where]
    error = results(client, batch.error_file_id)["wrong"]["response"]["body"]
    assert error.get("type", "error") == "error" and error["error"]["message"], "in the form of the line's dialect"


def test_a_wrong_file_fails_as_a_whole_with_line_numbers(client: openai.OpenAI, server: RunningServer) -> None:
    lines = [
        line("a"),
        "{not json",
        "[1]",
        line(""),
        line(7),
        line("a"),
        line("m", method="GET"),
        line("u", url="/v1/embeddings"),
        line("b", body="text"),
        line("s", {**BODY, "stream": True}),
        line("x", {**BODY, "model": "other"}),
        "",
        line("last"),
    ]
    batch = ended(client, batch_of(client, lines).id)
    assert batch.status == "failed" and batch.failed_at is not None and batch.output_file_id is None
    assert [fault.line for fault in batch.errors.data] == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert [fault.code for fault in batch.errors.data] == [
        "invalid_json_line", "invalid_json_line", "missing_required_parameter", "missing_required_parameter",
        "duplicate_custom_id", "invalid_method", "invalid_url", "missing_required_parameter", "invalid_value",
        "mismatched_model", "invalid_json_line",
    ]  # fmt: skip
    assert "line 6: custom_id 'a' is repeated: line 1 has it too" in batch.errors.data[4].message
    assert not server.engine.seen, "nothing has run"


def test_files_as_other_systems_write_them(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(line(f"n{n}")).encode() for n in range(3)) + b"\r\n\r\n\r\n"
    sent = client.files.create(file=content, purpose="batch")
    batch = client.batches.create(input_file_id=sent.id, endpoint=CHAT, completion_window="24h")
    assert ended(client, batch.id).request_counts.completed == 3
    monkeypatch.setattr(lines_module, "MAX_LINES", 2)
    many = ended(client, batch_of(client, [line(f"n{n}") for n in range(3)]).id)
    assert many.status == "failed" and many.errors.data[0].code == "too_many_lines"
    assert ended(client, batch_of(client, [""]).id).errors.data[0].code == "empty_file"
    unknown = ended(client, batch_of(client, [line("a", {**BODY, "model": "nobody's"})]).id)
    assert unknown.errors.data[0].code == "model_not_found"


def test_cancelling_keeps_what_is_done(client: openai.OpenAI, server: RunningServer) -> None:
    server.engine.delay_s = 0.1
    short = {**BODY, "max_tokens": 1}
    batch_id = batch_of(client, [line(f"n{n}", short if n < 4 else BODY) for n in range(24)]).id
    when(client, batch_id, lambda batch: batch.request_counts.completed >= 1 and len(server.engine.seen) > 5)
    with pytest.raises(openai.ConflictError, match="has not ended"):
        client.files.delete(client.batches.retrieve(batch_id).input_file_id)
    server.engine.delay_s = 3600.0  # from here on no line ends by itself: only what is given up can end in time
    when(client, batch_id, lambda batch: bool(server.engine.running))
    assert client.batches.cancel(batch_id).status == "cancelling"
    batch = ended(client, batch_id)
    assert batch.status == "cancelled" and batch.cancelled_at is not None
    answers, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert len(answers) == batch.request_counts.completed >= 1
    assert len(answers) + len(errors) == 24 and set(answers).isdisjoint(errors)
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
    assert server.engine.running == {} and server.engine.aborted
    assert client.batches.cancel(batch_id).status == "cancelled", "it stays as it is"
    client.files.delete(batch.input_file_id)


def test_what_is_not_answered_in_time_expires(client: openai.OpenAI, server: RunningServer) -> None:
    server.engine.max_running = 0
    file_id = upload(client, [line("late")])
    window: Any = "1m"
    batch_id = client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window=window).id
    when(client, batch_id, lambda batch: batch.status == "in_progress")
    context = server.app.state.context
    asyncio.run(rewound(context.state.database, batch_id))
    runner = next(one for one in context.services if isinstance(one, BatchRunner))
    running = runner._running[batch_id]
    running.task.get_loop().call_soon_threadsafe(running.task.cancel)
    deadline = time.monotonic() + SOON_S
    while batch_id in runner._running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.task.get_loop().call_soon_threadsafe(lambda: running.task.get_loop().create_task(runner._sweep()))
    batch = ended(client, batch_id)
    assert batch.status == "expired" and batch.expired_at and batch.output_file_id is None
    assert results(client, batch.error_file_id)["late"]["error"]["code"] == "batch_expired"
    assert batch.request_counts.failed == 1


async def rewound(database: Any, batch_id: str) -> None:
    """As if its time were over."""
    await database.write(
        lambda connection: connection.execute("UPDATE batches SET due_s = 1 WHERE id = ?", (batch_id,))
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "endpoint"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"endpoint": CHAT}, "completion_window"),
        ({"endpoint": CHAT, "completion_window": "soon"}, "completion_window"),
        ({"endpoint": CHAT, "completion_window": "99d"}, "completion_window"),
        ({"endpoint": CHAT, "completion_window": "24h", "metadata": {"a": 1}}, "metadata"),
        ({"endpoint": CHAT, "completion_window": "24h", "metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"endpoint": CHAT, "completion_window": "24h"}, "input_file_id"),
        (
            {"endpoint": CHAT, "completion_window": "24h", "output_expires_after": {"seconds": 5}},
            "output_expires_after.seconds",
        ),
    ],
)
def test_wrong_batches_are_refused_by_name(server: RunningServer, body: Any, param: str) -> None:
    reply = server.post("/v1/batches", body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_a_file_that_is_not_there_is_blamed_on_its_field(server: RunningServer) -> None:
    body = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": "file-x"}
    reply = server.post("/v1/batches", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "input_file_id")
    assert "there is no file 'file-x'" in reply.text


def test_a_batch_and_its_files_belong_to_a_key(serving: Serving) -> None:
    server = serving(ServerConfig(api_key=("one", "two")))
    one, two = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
    with one, two:
        batch = ended(one, batch_of(one, [line("a")]).id)
        with pytest.raises(openai.NotFoundError):
            two.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        assert list(two.batches.list()) == []
        for ask in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
        with pytest.raises(openai.NotFoundError):
            two.files.content(batch.output_file_id)


def test_a_batch_ends_with_its_key(serving: Serving, tmp_path: Path) -> None:
    """Lines of a batch that are answered after the key was revoked would know no limits and all models."""
    path = tmp_path / "keys.toml"
    mine, records = new_key([], KeyRecord(id="mine", sha256=""))
    _, records = new_key(records, KeyRecord(id="other", sha256=""))
    write_keys(path, records)
    ring = KeyRing(path=path)
    server = serving(ServerConfig(state=False), keys=ring)
    with openai.OpenAI(base_url=server.url + "/v1", api_key=mine) as client:
        server.engine.delay_s = 0.05
        batch = batch_of(client, [line(str(number)) for number in range(100)])
        assert eventually(lambda: server.engine.seen)
        write_keys(path, [record for record in records if record.id != "mine"])
        ring.reload()
        num_begun = len(server.engine.seen)
        write_keys(path, records)
        assert eventually(lambda: row_of(server, batch.id)["status"] == "completed")
        ring.reload()
        done = client.batches.retrieve(batch.id)
    assert len(server.engine.seen) <= num_begun + 1
    assert done.request_counts is not None and done.request_counts.failed >= 100 - len(server.engine.seen) > 0


def row_of(server: RunningServer, batch_id: str) -> Any:
    database = server.app.state.context.state.database
    return asyncio.run(database.read(lambda connection: table.reload(connection, batch_id)))


def test_each_batch_goes_to_its_model(serving: Serving) -> None:
    engines = [FakeEngine(), FakeEngine(info=replace(INFO, name="other"))]
    server = serving(gate=[EngineGate(engine) for engine in engines])
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        batch = ended(client, batch_of(client, [line(f"n{n}", {**BODY, "model": "other"}) for n in range(3)]).id)
        assert batch.request_counts.completed == 3 and batch.model == "other"
    assert [len(engine.seen) for engine in engines] == [0, 3]


def test_the_width_is_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("tokenmill.server.batches.width.time.monotonic", lambda: now)
    width = BatchWidth(64)
    assert width._limit == 16, "at first a quarter"
    now = 1.0
    width.adapt(0, 0)
    assert width._limit == 16
    now = 2.5
    width.adapt(0, 0)
    assert width._limit == 80, "alone: more than run at once"
    width.adapt(4, 0)
    assert width._limit == 15, "a quarter of what others leave"
    width.adapt(4, 1)
    assert width._limit == 0, "others wait"
    width.adapt(100, 0)
    assert width._limit == 1, "a full engine: one line waits for a row"


def test_only_those_that_somebody_waits_for_count(client: openai.OpenAI, server: RunningServer) -> None:
    server.engine.delay_s = 0.02
    live = server.app.state.context.live
    batch_id = batch_of(client, [line(f"n{n}") for n in range(8)]).id
    when(client, batch_id, lambda batch: len(server.engine.running) >= 2)
    assert live.interactive() == (0, 0)
    chat: Any = {**BODY, "stream": True}
    with client.chat.completions.create(**chat) as talk:
        next(iter(talk))
        assert live.interactive() == (1, 0)
    ended(client, batch_id)
