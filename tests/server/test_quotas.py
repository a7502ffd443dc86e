"""Limits of keys: kept on a virtual clock, told in headers, given back where they were not used."""

from __future__ import annotations

import random
from pathlib import Path

import anthropic
import pytest
from msgspec import structs

from tests.support.loopback import CHAT, RunningServer, Serving
from tests.support.timing import eventually
from tokenmill.config.server import ServerConfig
from tokenmill.errors import Overloaded
from tokenmill.server.keys import KeyRecord, KeyRing, new_key, write_keys
from tokenmill.server.quotas import KeyLimits, Quotas, RunQuota, duration

RECORD = KeyRecord(id="a", sha256="0" * 64)


class ManualClock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def limits(**given: int) -> tuple[KeyLimits, ManualClock]:
    clock = ManualClock()
    return KeyLimits(KeyRecord(id="a", sha256="0" * 64, **given), clock), clock  # type: ignore[arg-type]


def test_requests_come_back_evenly() -> None:
    key, clock = limits(requests_per_minute=6)
    for _ in range(6):
        key.begin()
    with pytest.raises(Overloaded, match="6 requests a minute") as refused:
        key.begin()
    assert refused.value.retry_after_s == pytest.approx(10)
    clock.now_s += 10
    key.begin()
    with pytest.raises(Overloaded):
        key.begin()


def test_what_was_not_used_is_given_back_and_what_was_overdrawn_is_owed() -> None:
    key, clock = limits(tokens_per_minute=1000)
    first = RunQuota(key)
    first.begin()
    first.reserve(900)
    with pytest.raises(Overloaded, match="100 left, 200 needed"):
        RunQuota(key).reserve(200)
    first.end(50)
    first.end(50)  # once more changes nothing
    assert key.tokens is not None and key.tokens.level == pytest.approx(950)
    huge = RunQuota(key)
    huge.begin()
    with pytest.raises(Overloaded):
        huge.reserve(5000)
    clock.now_s += 3
    huge.reserve(5000)  # a full bucket lets one through that is larger than itself
    huge.end(3000)
    assert key.tokens.level == pytest.approx(-2000)
    clock.now_s += 120
    assert key.tokens.level == pytest.approx(0)


def test_a_limit_is_never_exceeded_by_more_than_one_request() -> None:
    drawing = random.Random(3)
    key, clock = limits(tokens_per_minute=6000, requests_per_minute=60)
    running: list[tuple[RunQuota, int]] = []
    used = largest = num_requests = 0
    for _ in range(5000):
        clock.now_s += drawing.expovariate(20)
        if running and drawing.random() < 0.5:
            quota, most = running.pop(drawing.randrange(len(running)))
            actual = drawing.randrange(most + 1)
            used += actual
            quota.end(actual)
        quota, most = RunQuota(key), drawing.choice([10, 100, 1000, 4000])
        try:
            quota.begin()
            num_requests += 1
            quota.reserve(most)
        except Overloaded:
            quota.end(0)
            continue
        largest = max(largest, most)
        running.append((quota, most))
    elapsed = clock.now_s - 1000
    assert used <= 6000 + elapsed * 100 + largest
    assert num_requests <= 60 + elapsed + 1
    assert used > elapsed * 20, "and it is used"


def test_few_at_a_time() -> None:
    key, _ = limits(max_running=2)
    runs = [RunQuota(key) for _ in range(3)]
    for run in runs[:2]:
        run.begin()
    with pytest.raises(Overloaded, match="2 requests at a time"):
        runs[2].begin()
    runs[2].end(0)
    runs[0].end(0)
    runs[2].begin()


def test_changed_limits_go_on_from_what_was_used() -> None:
    """Keys are read again while requests run: they still count, and a changed limit is not a full one."""
    clock = ManualClock()
    quotas, few = Quotas(clock), KeyRecord(id="a", sha256="0" * 64, max_running=2, tokens_per_minute=1000)
    known = quotas.of(few)
    assert known is not None
    run = RunQuota(known)
    run.begin()
    run.reserve(900)
    changed = quotas.of(structs.replace(few, max_running=1, tokens_per_minute=2000))
    assert changed is not None and changed.tokens is not None and changed.tokens.level == pytest.approx(1100)
    with pytest.raises(Overloaded, match="1 requests at a time"):
        RunQuota(changed).begin()
    run.end(300)
    assert changed.num_running == 0 and changed.tokens.level == pytest.approx(1700)
    RunQuota(changed).begin()


def test_no_limits_cost_nothing() -> None:
    quotas = Quotas(ManualClock())
    assert quotas.of(None) is None and quotas.of(RECORD) is None
    few = KeyRecord(id="a", sha256="0" * 64, max_running=1)
    known = quotas.of(few)
    assert known is not None and quotas.of(few) is known


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.012, "12ms"), (0, "0ms"), (1.5, "1.5s"), (59, "59s"), (360, "6m0s"), (7384, "2h3m4s")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.fixture
def limited(serving: Serving, tmp_path: Path) -> tuple[RunningServer, str]:
    wanted = KeyRecord(id="alice", sha256="", requests_per_minute=3, tokens_per_minute=100_000, max_running=1)
    key, records = new_key([], wanted)
    write_keys(tmp_path / "keys.toml", records)
    return serving(ServerConfig(), keys=KeyRing(path=tmp_path / "keys.toml")), key


def test_clients_are_told_what_is_left(limited: tuple[RunningServer, str]) -> None:
    server, key = limited
    headers = {"authorization": f"Bearer {key}"}
    first = server.post("/v1/chat/completions", CHAT, headers=headers)
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 100_000
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    for is_stream in (True, False):
        again = server.post("/v1/chat/completions", {**CHAT, "stream": is_stream}, headers=headers)
        assert again.status_code == 200 and "x-ratelimit-limit-tokens" in again.headers
    refused = server.post("/v1/chat/completions", CHAT, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 15 <= int(refused.headers["retry-after"]) <= 20 and refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert server.get("/v1/models", headers=headers).status_code == 200, "what generates nothing is not counted"


def test_anthropics_client_reads_its_own_headers(limited: tuple[RunningServer, str]) -> None:
    server, key = limited
    with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
        ask = client.messages.with_raw_response.create
        turns = [{"role": "user", "content": "Hi"}]
        reply = ask(model="fake/tiny", max_tokens=9, messages=turns)  # type: ignore[arg-type]
        assert reply.headers["anthropic-ratelimit-requests-remaining"] == "2"
        assert reply.headers["anthropic-ratelimit-tokens-limit"] == "100000"
        assert reply.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
        for _ in range(2):
            ask(model="fake/tiny", max_tokens=9, messages=turns)  # type: ignore[arg-type]
        with pytest.raises(anthropic.RateLimitError):
            ask(model="fake/tiny", max_tokens=9, messages=turns)  # type: ignore[arg-type]


def test_one_at_a_time_also_after_clients_that_leave(limited: tuple[RunningServer, str]) -> None:
    server, key = limited
    server.engine.delay_s = 1.0
    headers = {"authorization": f"Bearer {key}"}
    with server.http.stream(
        "POST", server.url + "/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers
    ) as stream:
        lines = stream.iter_lines()  # kept: without it the client would leave
        next(lines)
        refused = server.http.post(server.url + "/v1/chat/completions", json=CHAT, headers=headers)
        assert refused.status_code == 429 and "at a time" in refused.text
    assert eventually(lambda: not server.engine.running)
    server.engine.delay_s = 0
    assert eventually(lambda: server.post("/v1/chat/completions", CHAT, headers=headers).status_code == 200)
