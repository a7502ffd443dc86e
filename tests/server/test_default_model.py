"""The default model behind a real server: vectors, what the metrics say of many requests, and what the log says."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.support.metric_values import metric_values
from tests.support.server_process import ServerProcess, real_server

SECRET = "heliotrope"


@pytest.fixture(scope="module")
def process(smollm2_path: Path) -> Iterator[ServerProcess]:
    with real_server(smollm2_path, num_blocks=512) as started:
        started.wait_for("ready", 120)
        yield started


def embedded(process: ServerProcess, texts: list[str], **changes: Any) -> list[Any]:
    reply = process.http.post("/v1/embeddings", json={"model": "tiny", "input": texts, **changes})
    assert reply.status_code == 200, reply.text
    return [item["embedding"] for item in reply.json()["data"]]


def metrics(process: ServerProcess) -> dict[str, float]:
    return metric_values(process.http.get("/metrics").text)


def test_embeddings_are_unit_vectors_that_know_what_is_alike(process: ServerProcess) -> None:
    cat, kitten, bond = embedded(process, ["a small cat", "a little kitten", "government bond yields fell"])
    assert len(cat) == 576 and math.hypot(*cat) == pytest.approx(1.0, rel=1e-5)
    assert dot(cat, kitten) > dot(cat, bond)
    (last,) = embedded(process, ["a small cat"], pooling="last")
    assert math.hypot(*last) == pytest.approx(1.0, rel=1e-5) and dot(cat, last) < 0.999


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_embeddings_equal_the_mean_of_hidden_states(process: ServerProcess, smollm2_path: Path) -> None:
    """The offline engine pools the same; in base64 and with fewer dimensions it is the same vector."""
    from tokenmill import LLM

    (sent,) = embedded(process, ["a small cat"])
    llm = LLM(str(smollm2_path), num_blocks=64, threads=1, backend="reference")
    (here,) = llm.embed(["a small cat"])
    assert dot(sent, here.embedding) == pytest.approx(1.0, abs=2e-3)
    (packed,) = embedded(process, ["a small cat"], encoding_format="base64")
    assert torch.frombuffer(bytearray(base64.b64decode(packed)), dtype=torch.float32).tolist() == pytest.approx(sent)
    (short,) = embedded(process, ["a small cat"], dimensions=64)
    norm = math.hypot(*sent[:64])
    assert short == pytest.approx([value / norm for value in sent[:64]], rel=1e-4)


def test_metrics_after_fifty_requests_equal_the_sum_of_usages(process: ServerProcess) -> None:
    before = metrics(process)

    def ask(number: int) -> Any:
        prompt = f"{SECRET} {'again ' * (number % 7)}"
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1 + number % 5, "n": 1 + number % 2, "seed": number}
        if number % 3 == 0:
            with openai.OpenAI(base_url=f"{process.url}/v1", api_key="unused", max_retries=0) as client:
                stream = client.completions.create(**body, stream=True, stream_options={"include_usage": True})
                return [chunk.usage for chunk in stream if chunk.usage][-1].model_dump()
        return process.http.post("/v1/completions", json=body).json()["usage"]

    with ThreadPoolExecutor(10) as pool:
        usages = list(pool.map(ask, range(50)))
    after = metrics(process)

    def moved(name: str) -> float:
        return after[name] - before[name]

    assert moved("tokenmill_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert moved("tokenmill_generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    finished = [name for name in after if name.startswith("tokenmill_requests_total")]
    assert sum(moved(name) for name in finished) == 50
    for series in ("request_seconds", "time_to_first_token_seconds", "queue_time_seconds"):
        assert moved(f"tokenmill_{series}_count") == 50
    assert moved("tokenmill_engine_busy_seconds_total") > 0 and moved("tokenmill_engine_steps_total") > 0


def test_the_log_has_one_line_a_request_and_no_text(process: ServerProcess) -> None:
    reply = process.http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": SECRET, "max_tokens": 3, "ignore_eos": True},
        headers={"x-request-id": "the-one"},
    )
    assert reply.status_code == 200
    lines = [line for line in process.output().splitlines() if "id=the-one" in line]
    assert len(lines) == 1
    assert re.search(r"status=200 .*completion_tokens=3 .*queue_ms=\S+ ttft_ms=\S+ total_ms=\S+", lines[0])
    assert SECRET not in process.output()
    assert "chosen: " in process.output() and "path=/health" not in process.output()
