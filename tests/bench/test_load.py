"""The load generator against a server whose schedule is known."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tokenmill.bench.client import Connection, Inbox
from tokenmill.bench.dialects import DIALECTS, RequestSpec
from tokenmill.bench.lag import ClientTooSlow, Lag
from tokenmill.bench.load import ClosedLoop, LoadRun, OpenLoop, Target, run_load
from tokenmill.bench.measures import percentile
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.totals import in_flight, totals
from tokenmill.bench.traffic import Lengths
from tokenmill.bench.workloads import Session, Workload, plain
from tokenmill.cli import main

Start = Callable[..., str]


def short(count: int) -> list[Session]:
    return list(islice(Workload(input_len=Lengths(4, 4), output_len=Lengths(8, 8)).sessions(), count))


def emitted(record: BenchRecord, began: float) -> list[float]:
    """When the stub wrote each piece, since the run began."""
    assert record.texts is not None
    return [float(text) - began for text in record.texts]


def check_schedule(run: LoadRun, ttft: float, itl: float) -> None:
    """What the client saw against what the server wrote, and against the schedule, within the client's own lag. One
    that holds things back would be tens of milliseconds late; a shared machine is late by a few, now and then."""
    assert run.lag is not None and all(record.is_ok for record in run.records)
    late = [s - w for r in run.records for s, w in zip(r.times_s, emitted(r, run.began), strict=True)]
    allowed = 0.005 + 2 * run.lag.p99_ms / 1e3
    assert min(late) >= 0 and percentile(late, 95) < allowed
    server_late = [w - (r.sent_s + ttft + n * itl) for r in run.records for n, w in enumerate(emitted(r, run.began))]
    slack = allowed + percentile([abs(x) for x in server_late], 99)  # the stub shares the machine and lags too
    gaps = np.concatenate([r.gaps_s for r in run.records])
    assert percentile([abs(r.ttft_s - ttft) for r in run.records], 95) < slack
    assert percentile(np.abs(gaps - itl), 95) < 2 * slack


@pytest.mark.serial
def test_times_match_the_schedule_with_50_streams(stub: Start) -> None:
    url = stub(ttft=0.1, itl=0.05, tokens=8)
    run = run_load(Target(url, "stub"), ClosedLoop(50, short(100)), keep_texts=True)
    assert len(run.records) == 100
    check_schedule(run, 0.1, 0.05)
    assert max(n for _, n in in_flight(run.records)) == 50


@pytest.mark.serial
def test_open_loop_keeps_its_times_whatever_the_server_does(stub: Start) -> None:
    url = stub(ttft=1.0, itl=0.01, tokens=2)
    times = [n * 0.01 for n in range(60)]
    run = run_load(Target(url, "stub"), OpenLoop(zip(times, short(60), strict=True)))
    assert run.lag is not None
    delays = [record.sent_s - at for record, at in zip(run.records, times, strict=True)]
    assert percentile(delays, 95) < 0.05 + 2 * run.lag.max_ms / 1e3  # a machine that stands still is no fault of ours
    assert max(n for _, n in in_flight(run.records)) >= 50  # nobody was answered before all had asked


def test_a_slowed_client_refuses_to_report(stub: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    url = stub(ttft=0.01, itl=0.01, tokens=20)
    read = Connection.data_received

    def slow(self: Connection, data: bytes) -> None:
        time.sleep(0.02)
        read(self, data)

    monkeypatch.setattr(Connection, "data_received", slow)
    run = run_load(Target(url, "stub"), ClosedLoop(16, short(16)))
    assert run.lag is not None
    with pytest.raises(ClientTooSlow, match="lagged"):
        run.lag.refuse_beyond(20.0)


def test_late_starts_refuse_too() -> None:
    Lag(0.1, 0.5, 3.0, 5.0, 0.2).refuse_beyond(20.0)
    with pytest.raises(ClientTooSlow, match="after their time"):
        Lag(0.1, 0.5, 3.0, 900.0, 0.2).refuse_beyond(20.0)


def test_command_reports_and_refuses(stub: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = stub(ttft=0.02, itl=0.005, tokens=6)
    result, page = tmp_path / "a.json", tmp_path / "a.html"
    arguments = ["bench", "serve", "--url", url, "--concurrency", "4", "--num-requests", "20", "--input-len", "8:16"]
    more = ["--goodput", "ttft=60s", "--max-lag-ms", "60000", "--output", str(result), "--html", str(page)]
    assert main([*arguments, *more]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["completed"], found["output_tokens"], found["tokens_from"]) == (20, 120, "usage")
    assert found["goodput_share"] == 1.0 and found["max_in_flight"] <= 4
    assert found["ttft"]["p50"] >= 0.02 and found["ttft"]["ci95"]["p95"]["low"] <= found["ttft"]["p95"]
    assert found["settings"]["num_requests"] == 20 and None not in found["settings"].values()
    text = page.read_text()
    assert text.count("<figure>") == 11 and "<script" not in text and "nothing was measured" not in text
    assert main(["bench", "report", str(result), str(result)]) == 0
    compared = capsys.readouterr().out
    assert "TTFT: a" in compared and " =" in compared and "What differs" not in compared  # a run is equal to itself
    assert main(["bench", "report", str(result), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["name"] == "a"  # and nothing else
    assert main([*arguments, "--max-lag-ms", "0.000001"]) == 1
    assert "no report" in capsys.readouterr().err


def test_errors_have_classes() -> None:
    run = run_load(Target("http://127.0.0.1:9", "stub"), ClosedLoop(2, short(2)))
    assert totals(run.records)["errors"] == {"connect": 2}


def test_a_request_without_an_answer_times_out(stub: Start) -> None:
    run = run_load(Target(stub(ttft=30), "stub", timeout_s=0.2), ClosedLoop(1, short(1)))
    assert [record.error for record in run.records] == ["timeout"]


# ── the parser, fed every possible way ─────────────────────────────────────────────────────────────────


def parse(data: bytes, sizes: list[int], *, ends: bool = False, dialect: str = "openai-chat") -> BenchRecord:
    async def feed() -> BenchRecord:
        loop = asyncio.get_running_loop()
        connection, record = Connection(DIALECTS[dialect], time.perf_counter(), Inbox(loop)), BenchRecord()
        connection._record, connection._done = record, loop.create_future()
        place = 0
        for size in sizes:
            connection.data_received(data[place : place + size])
            place += size
        if ends:
            connection.eof_received()
        await asyncio.wait({asyncio.ensure_future(connection._done)}, timeout=0.05)
        return record

    return asyncio.run(feed())


EVENTS = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b": ping\n\n",
    b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":" there"}}]}\r\n\r\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\ndata: [DONE]\n\n',
)
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = (
    OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in EVENTS) + b"0\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 61, 10_000])
def test_chunks_may_be_cut_anywhere(size: int) -> None:
    record = parse(CHUNKED, [size] * (len(CHUNKED) // size + 1))
    assert (record.status, record.error, len(record.times_s)) == (200, None, 2)
    assert (record.input_tokens, record.output_tokens, record.finish_reason) == (7, 2, "stop")


def test_bodies_with_a_length_or_none() -> None:
    body = b"".join(EVENTS)
    counted = OK + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert parse(counted, [len(counted)]).num_tokens == 2
    assert parse(OK + b"\r\n" + body, [len(OK) + 2 + len(body)], ends=True).error is None
    assert parse(CHUNKED[:-5], [len(CHUNKED)], ends=True).error == "cut"
    refused = b'HTTP/1.1 429 Too Many Requests\r\nContent-Length: 7\r\n\r\n{"a":1}'
    record = parse(refused, [len(refused)])
    assert (record.error, record.detail) == ("http_429", '{"a":1}')
    for nonsense in (
        b"nonsense\r\n\r\n",
        OK + b"Content-Length: -5\r\n\r\nabc",
        CHUNKED.replace(b"0\r\n\r\n", b"-5\r\nabc"),
    ):
        assert parse(nonsense, [len(nonsense)]).error == "bad_reply"


def test_an_answer_that_breaks_off_anywhere_ends_its_request_and_no_other() -> None:
    """Half a line is no JSON: read all the same, it once stopped the clock of every other stream."""
    for size in range(len(CHUNKED) - 5):
        assert parse(CHUNKED, [size], ends=True).error == "cut", size
    half = b"".join(EVENTS)[:-40]
    assert parse(OK + b"\r\n" + half, [len(OK) + 2 + len(half)], ends=True).error == "bad_reply"
    counted = OK + b"Content-Length: %d\r\n\r\n" % len(half) + half
    assert parse(counted, [len(counted)]).error == "bad_reply"

    async def out_of_time() -> BenchRecord:
        loop = asyncio.get_running_loop()
        connection, record = Connection(DIALECTS["openai-chat"], time.perf_counter(), Inbox(loop)), BenchRecord()
        connection._record, connection._done = record, loop.create_future()
        connection.data_received(CHUNKED[:200])
        await asyncio.sleep(0)
        connection.time_out()
        await asyncio.wait_for(connection._done or asyncio.sleep(0), 1)
        return record

    assert asyncio.run(out_of_time()).error == "timeout"


def test_every_dialect_reads_its_own_stream() -> None:
    streams = {
        "openai-completions": b'data: {"choices":[{"text":"Hi","finish_reason":null}]}\n\n'
        b'data: {"choices":[{"text":" you","finish_reason":"length"}],'
        b'"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\ndata: [DONE]\n\n',
        "anthropic": b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":7}}}\n\n'
        b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"Hi"}}\n\n'
        b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":" you"}}\n\n'
        b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":2}}\n\n',
        "ollama": b'{"message":{"content":"Hi"},"done":false}\n{"message":{"content":" you"},"done":false}\n'
        b'{"done":true,"done_reason":"stop","prompt_eval_count":7,"eval_count":2}\n',
        "tgi": b'data:{"token":{"text":"Hi"}}\n\ndata:{"token":{"text":" you"},'
        b'"details":{"finish_reason":"length","generated_tokens":2,"input_length":7}}\n\n',
    }
    assert set(streams) | {"openai-chat"} == set(DIALECTS)
    for name, body in streams.items():
        data = OK + b"Content-Length: %d\r\n\r\n" % len(body) + body
        record = parse(data, [11] * (len(data) // 11 + 1), dialect=name)
        assert (record.error, len(record.times_s)) == (None, 2), name
        assert (record.input_tokens, record.output_tokens) == (7, 2), name
        assert record.finish_reason is not None, name


def test_bodies_name_what_is_asked() -> None:
    ask = plain("one two", 2, 9).turns[0]
    for dialect in DIALECTS.values():
        body = json.dumps(dialect.body(ask, "m"))
        assert "one two" in body and "9" in body
    ids = RequestSpec(({"role": "user", "content": ""},), 5, prompt_ids=(1, 2, 3))
    assert DIALECTS["openai-completions"].body(ids, "m")["prompt"] == [1, 2, 3]
