"""The ledger adds up to the metrics and to what clients count themselves, and no key sees another's rows."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.metric_values import metric_values
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.timing import SOON_S, eventually
from tokenmill.cli import main
from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidRequest
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.ledger import Ledger, groups_of, moment_of
from tokenmill.server.routing import user_in
from tokenmill.server.state.database import Database, T, Work

KEYS = ("alice", "bob")


def as_key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def ask(server: ScriptedServer, name: str, **more: Any) -> tuple[int, int]:
    body = {"model": "scripted", "prompt": "Once upon a time", "max_tokens": 5, "user": f"{name}'s friend", **more}
    reply = server.post("/v1/completions", body, headers=as_key(name))
    usage = reply.json().get("usage", {"prompt_tokens": 0, "completion_tokens": 0})
    return usage["prompt_tokens"], usage["completion_tokens"]


def leave_early(server: ScriptedServer, name: str) -> None:
    body = {"model": "scripted", "prompt": "Once upon a time", "max_tokens": 200, "stream": True}
    with server.http.stream("POST", server.url + "/v1/completions", json=body, headers=as_key(name)) as reply:
        next(reply.iter_lines())


def usage(server: ScriptedServer, name: str, query: str = "") -> list[dict[str, Any]]:
    return list(server.get(f"/v1/usage{query}", headers=as_key(name)).json()["data"])


def test_the_ledger_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ServerConfig(api_key=KEYS, state_dir=tmp_path, public_metrics=True)
    with scripted_server([{"say": "word " * 300, "token_delay_s": 0.002}], config=config) as server:
        with ThreadPoolExecutor(6) as pool:
            counted = list(pool.map(lambda number: ask(server, KEYS[number % 2]), range(20)))
        refused = ask(server, "bob", temperature=-1)
        leave_early(server, "alice")
        assert refused == (0, 0)
        assert eventually(lambda: len(usage(server, "alice", "?group_by=outcome")) == 2)
        (alice,), (bob,) = usage(server, "alice", "?group_by="), usage(server, "bob", "?group_by=")
        assert alice["requests"] == 11 and bob["requests"] == 11
        assert bob["completion_tokens"] == sum(one for _, one in counted[1::2])
        by_outcome = {row["outcome"]: row for row in usage(server, "alice", "?group_by=outcome")}
        assert by_outcome["length"]["completion_tokens"] == sum(one for _, one in counted[::2])
        assert by_outcome["abort"]["completion_tokens"] >= 1, "tokens of who left count"
        busy_s = metric_values(server.get("/metrics").text)["tokenmill_engine_busy_seconds_total"]
        assert 0.0 < alice["device_s"] + bob["device_s"] <= busy_s + 0.01, "parts of the steps' time, not more"
        metrics = metric_values(server.get("/metrics").text)
        assert metrics["tokenmill_prompt_tokens_total"] == alice["prompt_tokens"] + bob["prompt_tokens"]
        assert metrics["tokenmill_generation_tokens_total"] == alice["completion_tokens"] + bob["completion_tokens"]
        assert [row["user"] for row in usage(server, "bob", "?group_by=user")] == ["bob's friend"]
        assert server.get("/v1/usage?group_by=text", headers=as_key("bob")).status_code == 400
    assert main(["usage", "--by", "key,model", "--csv", "--state-dir", str(tmp_path)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 3 and {row["model"] for row in rows} == {"scripted", ""}, "who was refused had no model yet"
    assert sum(int(row["requests"]) for row in rows) == 22
    assert main(["usage", "--json", "--state-dir", str(tmp_path)]) == 0
    assert sum(row["completion_tokens"] for row in json.loads(capsys.readouterr().out)) == (
        alice["completion_tokens"] + bob["completion_tokens"]
    )
    assert main(["usage", "--state-dir", str(tmp_path / "none")]) == 2


def test_without_keys_nothing_is_kept(tmp_path: Path) -> None:
    with scripted_server([{"say": "Fine."}], config=ServerConfig(state_dir=tmp_path)) as server:
        ask(server, "nobody")
        assert usage(server, "nobody", "?group_by=") == [
            {
                "requests": 0,
                "prompt_tokens": 0,
                "cached_tokens": 0,
                "completion_tokens": 0,
                "reasoning_tokens": 0,
                "device_s": 0,
            }
        ]


def test_rows_that_come_while_others_are_written_wait_for_no_request() -> None:
    async def run() -> None:
        database = SlowDatabase(None)
        ledger = Ledger(database)
        ledger.add(RequestRecord("first", "POST", "/", is_generation=True))
        await until(lambda: database.is_busy)
        ledger.add(RequestRecord("second", "POST", "/", is_generation=True))
        database.may_go_on.set()
        await until(lambda: database.num_written == 2)
        await database.close()

    asyncio.run(run())


def test_a_full_disk_delays_rows_and_a_stopping_server_loses_none() -> None:
    async def run() -> None:
        database = SlowDatabase(None)
        database.fails = True
        ledger = Ledger(database)
        ledger.add(RequestRecord("first", "POST", "/", is_generation=True))
        await until(lambda: database.num_failed >= 1)
        database.fails = False
        await until(lambda: database.is_busy)  # without another request
        ledger.add(RequestRecord("second", "POST", "/", is_generation=True))
        closing = asyncio.create_task(ledger.close())  # while the first is being written
        await asyncio.sleep(0.05)
        database.may_go_on.set()
        await closing
        await database.close()
        assert database.num_written == 2

    asyncio.run(run())


def test_a_clock_that_jumps_ages_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[dict[str, Any]]:
        ledger = Ledger(Database(None))
        ledger.add(RequestRecord("before", "POST", "/", is_generation=True))
        await ledger.write()
        now_s = time.time()
        with monkeypatch.context() as jumped:
            jumped.setattr(time, "time", lambda: now_s + 1000 * 86_400)
            ledger.add(RequestRecord("then", "POST", "/", is_generation=True))
            await ledger.write()
        rows = await ledger.usage([], 0.0, None)
        await ledger.close()
        return rows

    assert asyncio.run(run())[0]["requests"] == 2


class SlowDatabase(Database):
    """Waits before it writes, or fails."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path)
        self.is_busy = self.fails = False
        self.num_written = self.num_failed = 0
        self.may_go_on = threading.Event()

    async def write(self, work: Work[T]) -> T:
        def slow(connection: sqlite3.Connection) -> T:
            if self.fails:
                self.num_failed += 1
                raise sqlite3.OperationalError("database or disk is full")
            self.is_busy = True
            assert self.may_go_on.wait(SOON_S)
            result = work(connection)
            (self.num_written,) = connection.execute("SELECT count(*) FROM usage").fetchone()
            return result

        return await super().write(slow)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not is_so():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("named", "kept"), [("Ann Ü 株", "Ann Ü 株"), ("a\x1b[2J\n\u202eb\x00", "a[2Jb"), ("\x07", "")]
)
def test_the_name_of_a_user_moves_no_operators_terminal(named: str, kept: str) -> None:
    assert user_in({"user": named}) == user_in({"metadata": {"user_id": named}}) == kept


def test_groups_and_spans_are_checked() -> None:
    assert groups_of("key, day,key") == ["key", "day"]
    with pytest.raises(InvalidRequest, match="group_by"):
        groups_of("key; DROP TABLE usage")
    assert moment_of("7d", 1_000_000.0) == 1_000_000.0 - 7 * 86_400
    assert moment_of("1970-01-02", 0.0) == 86_400
    with pytest.raises(InvalidRequest, match="since"):
        moment_of("yesterday", 0.0)


def test_times_between_outputs_and_sizes_of_steps_are_measured() -> None:
    with scripted_server([{"say": "word " * 300, "token_delay_s": 0.002}]) as server:
        body = {"model": "scripted", "prompt": "Once upon a time", "max_tokens": 30, "n": 2, "stream": True}
        lines = [line for line in server.post("/v1/completions", body).text.splitlines() if line.startswith("data: {")]
        values = metric_values(server.get("/metrics").text)
        most = sum('"finish_reason":null' in line or '"finish_reason":"length"' in line for line in lines)
        assert 2 <= values["tokenmill_inter_token_latency_seconds_count"] <= most - 2, "two streams of their own"
        assert values["tokenmill_step_tokens_sum"] >= 60
        assert values["tokenmill_request_max_tokens_sum"] == 30 and values["tokenmill_request_num_choices_sum"] == 2
        assert values["tokenmill_http_responses_total{200}"] >= 1
        name = "tokenmill_event_loop_lag_seconds_count"
        assert eventually(lambda: metric_values(server.get("/metrics").text)[name] > 0)
