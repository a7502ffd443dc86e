"""The whole house: a real server process, a real engine process, a small trained model, real clients."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.malformed_requests import cases, require_error_body
from tests.support.metric_values import metric_values
from tests.support.server_process import ServerProcess, is_alive, real_server
from tests.support.timing import SOON_S

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 48}
SMALLEST_MARGIN = 1e-3  # below, another order of additions may choose another token


@pytest.fixture(scope="module")
def process(stories_dir: Path) -> Iterator[ServerProcess]:
    with real_server(stories_dir, dtype="float32", scheduler={"max_running": 32}) as started:
        started.wait_for("ready")
        yield started
        started.wait_for("ready")
        children = started.children()  # before: a server that has nothing to do may end at once
        started.terminate()
        assert started.wait() == 0
        assert children and not any(is_alive(pid) for pid in children)


@pytest.fixture(scope="module")
def client(process: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def goldens(shared_dir: Path) -> list[dict[str, Any]]:
    path = shared_dir / "goldens" / "stories260K" / "golden_greedy.json"
    return [case for case in json.loads(path.read_text())["cases"] if len(case["prompt_ids"]) > 1]


def complete(process: ServerProcess, **changes: Any) -> dict[str, Any]:
    reply = process.http.post("/v1/completions", json={**COMPLETION, **changes})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def text_of(process: ServerProcess, **changes: Any) -> str:
    return str(complete(process, **changes)["choices"][0]["text"])


def streamed(process: ServerProcess, **changes: Any) -> str:
    body = {**COMPLETION, **changes, "stream": True}
    with process.http.stream("POST", "/v1/completions", json=body) as reply:
        chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def metrics(process: ServerProcess) -> dict[str, float]:
    return metric_values(process.http.get("/metrics").text)


def stats(process: ServerProcess) -> tuple[float, float]:
    """(running + waiting, share of KV blocks in use)"""
    seen = metrics(process)
    return seen["tokenmill_requests_running"] + seen["tokenmill_requests_waiting"], seen["tokenmill_kv_usage_ratio"]


def aborted(process: ServerProcess) -> float:
    return metrics(process)["tokenmill_requests_total{abort}"]


def wait_until_idle(process: ServerProcess) -> None:
    deadline = time.monotonic() + SOON_S
    while (seen := stats(process)) != (0.0, 0.0):
        assert time.monotonic() < deadline, f"still busy: {seen}"
        time.sleep(0.02)


def asked_together(
    process: ServerProcess, pool: ThreadPoolExecutor, ask: Callable[[], Any], count: int, seen: int
) -> Any:
    """The futures of so many calls at once, of which at least `seen` were seen under way at one time: called again and
    again until they were, since a machine that stands still may let one end before the next begins."""
    for _ in range(50):
        replies = [pool.submit(ask) for _ in range(count)]
        while not any(reply.done() for reply in replies):
            if stats(process)[0] >= seen:
                return replies
        wait(replies)
    raise AssertionError(f"never {seen} at one time")


def sure_steps(case: dict[str, Any]) -> list[dict[str, Any]]:
    steps = case["greedy"]
    unsure = [place for place, step in enumerate(steps) if step["margin"] < SMALLEST_MARGIN]
    return list(steps[: unsure[0] if unsure else len(steps)])


def test_greedy_answers_equal_the_goldens(process: ServerProcess, goldens: list[dict[str, Any]]) -> None:
    for case in goldens:
        steps = sure_steps(case)[:32]
        reply = complete(process, prompt=case["prompt"], max_tokens=len(steps), logprobs=5)
        tokens = reply["choices"][0]["logprobs"]["token_logprobs"]
        assert tokens == pytest.approx([step["logprob"] for step in steps], abs=1e-3)
        assert reply["usage"]["prompt_tokens"] == len(case["prompt_ids"])
        by_ids = complete(process, prompt=case["prompt_ids"], max_tokens=len(steps))
        assert by_ids["choices"][0]["text"] == reply["choices"][0]["text"]


def test_stream_n_and_seed(client: openai.OpenAI, process: ServerProcess) -> None:
    whole = text_of(process)
    assert streamed(process) == whole
    assert [choice["text"] for choice in complete(process, n=3)["choices"]] == [whole] * 3
    sampled = {"temperature": 1.0, "seed": -7}
    assert text_of(process, **sampled) == text_of(process, **sampled) == streamed(process, **sampled)
    assert text_of(process, **sampled) != text_of(process, temperature=1.0, seed=8)


def test_stop_strings_across_token_borders(process: ServerProcess) -> None:
    whole = text_of(process)
    for start in range(5, len(whole) - 6, 11):
        stop = whole[start : start + 5]
        reply = complete(process, stop=[stop])["choices"][0]
        assert (reply["text"], reply["finish_reason"]) == (whole[: whole.index(stop)], "stop")
        assert streamed(process, stop=[stop]) == reply["text"]


def test_logprobs_join_to_the_content(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tell me a story"}]
    reply = client.chat.completions.create(
        model="tiny", messages=messages, logprobs=True, top_logprobs=5, max_tokens=24, temperature=0
    )
    tokens = reply.choices[0].logprobs.content  # type: ignore[union-attr]
    assert b"".join(bytes(token.bytes or []) for token in tokens or []).decode() == reply.choices[0].message.content
    for token in tokens or []:
        values = [top.logprob for top in token.top_logprobs]
        assert len(values) == 5 and values == sorted(values, reverse=True) and values[0] <= 0
        assert token.logprob == pytest.approx(values[0])


def test_logit_bias(process: ServerProcess, goldens: list[dict[str, Any]]) -> None:
    case = goldens[0]
    first = case["greedy"][0]
    banned = complete(process, prompt=case["prompt"], max_tokens=1, logprobs=0, logit_bias={str(first["id"]): -100})
    assert banned["choices"][0]["logprobs"]["token_logprobs"][0] < first["logprob"]
    other = case["greedy"][0]["top5"][4][0]
    forced = complete(process, prompt=case["prompt"], max_tokens=1, logit_bias={str(other): 100})
    tokenized = process.http.post("/detokenize", json={"tokens": [other]}).json()["prompt"]
    assert forced["choices"][0]["text"].strip() == tokenized.strip()


def test_echo_scores_the_prompt_like_the_reference(process: ServerProcess, goldens: list[dict[str, Any]]) -> None:
    for case in goldens:
        choice = complete(process, prompt=case["prompt"], echo=True, logprobs=0, max_tokens=0)["choices"][0]
        assert choice["text"] == case["prompt"]
        first, *others = choice["logprobs"]["token_logprobs"]
        assert first is None
        assert others == pytest.approx(case["prompt_logprobs_from_second_token"], abs=1e-3)


def test_echoed_tokens_stand_where_they_say(process: ServerProcess) -> None:
    """Also behind a first space that only the tokenizer writes."""
    choice = complete(process, prompt="Lily went", echo=True, logprobs=0, max_tokens=4, temperature=0)["choices"][0]
    places = list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))
    assert places[:2] == [("", 0), (" Lily", 0)]
    assert all(choice["text"].startswith(token, offset) for token, offset in places[2:])
    assert sum(len(token) for token, offset in places if offset >= len("Lily went")) == len(choice["text"]) - 9


def test_what_tokens_spell_joins_to_the_text(process: ServerProcess) -> None:
    asked = {"prompt": "Lily went out", "add_special_tokens": False, "return_token_strs": True}
    reply = process.http.post("/tokenize", json=asked).json()
    assert "".join(reply["token_strs"]) == " Lily went out" and len(reply["token_strs"]) == reply["count"]


def test_one_id_for_several_calls_is_no_conflict(process: ServerProcess) -> None:
    """As from a proxy that hands on the id of what they are all part of."""
    body = {**COMPLETION, "max_tokens": 200, "ignore_eos": True}

    def call(_: int) -> str:
        reply = process.http.post("/v1/completions", json=body, headers={"x-request-id": "trace-1"})
        assert reply.headers["x-request-id"] == "trace-1"
        return str(reply.json()["choices"][0]["text"])

    with ThreadPoolExecutor(4) as callers:
        assert len(set(callers.map(call, range(4)))) == 1


def test_cached_tokens_are_reported(process: ServerProcess) -> None:
    prompt = "Once upon a time there was a dog. " * 8
    before, after = (complete(process, prompt=prompt, max_tokens=1)["usage"] for _ in range(2))
    assert after["prompt_tokens_details"]["cached_tokens"] > before["prompt_tokens_details"]["cached_tokens"]


def test_speculation_is_reported(process: ServerProcess) -> None:
    """How much is guessed depends on the machine's pace; that it is told does not."""
    usage = complete(process, prompt="Once upon a time", max_tokens=60, temperature=0)["usage"]
    assert 0 <= usage["speculation"]["accepted"] <= usage["speculation"]["proposed"]


def test_too_long_and_unknown_ids(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="once " * 2000, stream=True)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=[512])


def test_embeddings(client: openai.OpenAI) -> None:
    reply = client.embeddings.create(model="tiny", input=["a cat", "a dog", "a cat"], dimensions=16)
    vectors = [item.embedding for item in reply.data]
    assert vectors[0] == vectors[2] != vectors[1] and len(vectors[0]) == 16
    assert sum(value * value for value in vectors[0]) == pytest.approx(1.0, rel=1e-5)


def test_64_concurrent_streams_equal_single_runs(process: ServerProcess) -> None:
    asked = [
        {"prompt": f"Once upon a time {'there ' * (place % 5)}", "temperature": 0.8, "seed": place, "max_tokens": 64}
        for place in range(8)
    ]
    alone = [text_of(process, **changes) for changes in asked]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda place: streamed(process, **asked[place % 8]), range(64)))
    assert together == alone * 8


def test_hostile_bodies_leave_the_processes_alone(process: ServerProcess) -> None:
    children = process.children()
    hostile: list[dict[str, Any]] = [
        {"n": 10**6},
        {"prompt": ["x"] * 10**5},
        {"logprobs": 10**6},
        {"stop": ["x"] * 10**5},
        {"logit_bias": {str(key): 1 for key in range(10**5)}},
        {"max_tokens": 2**40},
        {"prompt": "x" * 3_000_000},
        {"prompt": [10**9]},
    ]
    for changes in hostile:
        started = time.perf_counter()
        reply = process.http.post("/v1/completions", json={**COMPLETION, **changes})
        assert 400 <= reply.status_code < 500 and time.perf_counter() - started < SOON_S
    assert process.children() == children
    assert text_of(process).strip()


def test_every_wrong_body_leaves_the_processes_alone(process: ServerProcess) -> None:
    """The whole table of malformed bodies, against real processes."""
    children, expected, count = process.children(), text_of(process), 0
    for path, body, blamed in cases():
        if b'"dimensions":17' in body:  # this model has so many
            continue
        started = time.perf_counter()
        content = body.replace(b'"fake/tiny"', b'"tiny"')
        reply = process.http.post(path, content=content, headers={"content-type": "application/json"})
        where = f"{path} {content[:120]!r} → {reply.status_code} {reply.text[:300]}"
        assert 400 <= reply.status_code < 500 and time.perf_counter() - started < SOON_S, where
        error = require_error_body(reply)
        assert blamed is None or (error["param"] or "").split("[")[0].split(".")[0] == blamed, where
        count += 1
    assert count >= 600 and process.children() == children
    assert text_of(process) == expected


def test_two_hundred_vanishing_clients(process: ServerProcess) -> None:
    wait_until_idle(process)
    expected, aborted_before = text_of(process), aborted(process)
    arrived = threading.Barrier(21)

    def vanish(number: int) -> None:
        with httpx.Client(base_url=process.url, timeout=60, verify=False) as client:
            for turn in range(10):
                body = {
                    **COMPLETION,
                    "stream": True,
                    "max_tokens": 400,
                    "ignore_eos": True,
                    "prompt": f"{number} {turn}",
                }
                with client.stream("POST", "/v1/completions", json=body) as reply:
                    if turn % 2:
                        next(reply.iter_lines())
        arrived.wait(60)

    threads = [threading.Thread(target=vanish, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    arrived.wait(60)
    wait_until_idle(process)
    for thread in threads:
        thread.join()
    assert aborted(process) - aborted_before > 100  # some are computed before their client is gone
    assert text_of(process) == expected


def test_requests_of_a_killed_engine_are_answered_by_the_next(process: ServerProcess) -> None:
    (engine_pid,) = process.children()

    def ask() -> httpx.Response:
        body = {**COMPLETION, "max_tokens": 480, "ignore_eos": True, "n": 4}
        return process.http.post("/v1/completions", json=body)

    expected = ask().json()["choices"]
    with ThreadPoolExecutor(8) as pool:
        replies = asked_together(process, pool, ask, 8, seen=4)
        os.kill(engine_pid, signal.SIGKILL)
        answers = [reply.result(timeout=60) for reply in replies]
    # One that came while there was no engine was told to come again.
    assert {reply.status_code for reply in answers} <= {200, 503}
    assert [reply.json()["choices"] for reply in answers if reply.status_code == 200].count(expected) >= 4
    assert all(reply.json()["choices"] == expected for reply in answers if reply.status_code == 200)
    process.wait_for("ready")
    assert process.children() != [engine_pid] and len(process.children()) == 1


def test_sigterm_under_load(stories_dir: Path) -> None:
    with real_server(stories_dir, dtype="float32") as process, ThreadPoolExecutor(5) as pool:
        process.wait_for("ready")
        long = {"max_tokens": 400, "ignore_eos": True}
        expected = text_of(process, **long)
        replies = asked_together(process, pool, lambda: streamed(process, **long), 5, seen=5)
        children = process.children()
        process.terminate()
        assert [reply.result(timeout=60) for reply in replies] == [expected] * 5
        assert process.wait() == 0
        assert not any(is_alive(pid) for pid in children)


def test_queue_limit(stories_dir: Path) -> None:
    limits = {"max_running": 2, "max_waiting": 4}
    with real_server(stories_dir, dtype="float32", scheduler=limits) as process, ThreadPoolExecutor(20) as pool:
        process.wait_for("ready")
        long = {"max_tokens": 400, "ignore_eos": True}  # so that all are there before the first has ended
        expected = text_of(process, **long)
        bodies = [{**COMPLETION, **long} for _ in range(20)]
        replies = list(pool.map(lambda body: process.http.post("/v1/completions", json=body), bodies))
        assert all(reply.status_code in (200, 429, 503) for reply in replies), [reply.text for reply in replies]
        refused = [reply for reply in replies if reply.status_code in (429, 503)]
        assert refused and all(reply.headers["retry-after"] for reply in refused)
        answered = [reply.json()["choices"][0]["text"] for reply in replies if reply.status_code == 200]
        assert answered and set(answered) == {expected} and len(answered) + len(refused) == 20
        process.terminate()
        assert process.wait() == 0


# ── the same conversation in several dialects ──────────────────────────────────────────────────────────

STORYTELLER = "You tell stories to small children, about animals and toys and the weather. " * 3
QUESTION = {"role": "user", "content": "Tell me of Lily"}


def messages(process: ServerProcess, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 24, "temperature": 0, "messages": [QUESTION], **changes}
    reply = process.http.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_dialects_agree_on_text_and_tokens(process: ServerProcess) -> None:
    turns = [{"role": "system", "content": STORYTELLER}, QUESTION]
    body = {"model": "tiny", "max_tokens": 24, "temperature": 0, "messages": turns}
    openais = process.http.post("/v1/chat/completions", json=body).json()
    anthropics = messages(process, system=STORYTELLER)
    assert anthropics["content"][0]["text"] == openais["choices"][0]["message"]["content"]
    usage = anthropics["usage"]
    counted = process.http.post(
        "/v1/messages/count_tokens", json={"model": "tiny", "system": STORYTELLER, "messages": [QUESTION]}
    ).json()["input_tokens"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert prompt == counted == openais["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == openais["usage"]["completion_tokens"]


def test_an_accounting_block_that_changes_does_not_defeat_the_prefix_cache(process: ServerProcess) -> None:
    def asked(number: int) -> dict[str, int]:
        accounting = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.325; cch={number:05x};"}
        told = {"type": "text", "text": f"Of cats and dogs. {STORYTELLER}", "cache_control": {"type": "ephemeral"}}
        return dict(messages(process, system=[accounting, told])["usage"])

    first, second = asked(1), asked(2)
    assert first["cache_read_input_tokens"] < 32 and first["input_tokens"] > 100
    assert second["cache_read_input_tokens"] > first["input_tokens"] - 32, "all but the last block of tokens"
    assert sum(first[name] for name in first if name.endswith("input_tokens")) == (
        second["input_tokens"] + second["cache_read_input_tokens"]
    )
