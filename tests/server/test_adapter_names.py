"""Adapters as model names of a real server: listed, asked for in every dialect, loaded and unloaded while it runs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess, real_server
from tests.support.timing import SOON_S

UPPER, BANG = "lora_r8_upper", "rslora_r16_bang"
ONCE = "Once upon a time"


@pytest.fixture(scope="module")
def trained_dir(shared_dir: Path) -> Path:
    return shared_dir / "goldens" / "tiny" / "adapters"


@pytest.fixture(scope="module")
def process(stories_dir: Path, trained_dir: Path) -> Iterator[ServerProcess]:
    adapters = {"adapter": [f"upper={trained_dir / UPPER}"], "adapter_slots": 2, "max_adapter_rank": 16}
    with real_server(stories_dir, dtype="float32", adapters=adapters) as started:
        started.wait_for("ready")
        yield started


@pytest.fixture
def client(process: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=process.url, timeout=60) as client:
        yield client


def completion(client: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": ONCE, "temperature": 0, "max_tokens": 32}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def names(client: httpx.Client) -> dict[str, Any]:
    return {row["id"]: row.get("parent") for row in client.get("/v1/models").json()["data"]}


def test_an_adapter_is_a_model_with_a_parent(client: httpx.Client) -> None:
    assert names(client)["tiny:upper"] == "tiny"
    assert completion(client, "upper") == completion(client, "tiny:upper")
    assert completion(client, "upper").isupper()
    assert not completion(client, "tiny").isupper()
    assert client.post("/v1/completions", json={"model": "tiny:other", "prompt": ONCE}).status_code == 404


def test_other_dialects_name_adapters_too(client: httpx.Client) -> None:
    asked = {"inputs": ONCE, "parameters": {"max_new_tokens": 32, "adapter_id": "upper"}}
    assert client.post("/generate", json=asked).json()["generated_text"] == completion(client, "upper")
    asked["parameters"] = {"adapter_id": "other"}
    assert client.post("/generate", json=asked).status_code == 404
    body = {
        "model": "upper",
        "prompt": ONCE,
        "raw": True,
        "stream": False,
        "options": {"temperature": 0, "num_predict": 32},
    }
    assert client.post("/api/generate", json=body).json()["response"].isupper()


def test_adapters_come_and_go_beside_running_requests(client: httpx.Client, trained_dir: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(completion, client, model) for model in ("tiny", "upper") * 6]
        load = {"lora_name": "bang", "lora_path": str(trained_dir / BANG)}
        reply = client.post("/v1/load_lora_adapter", json=load)
        assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'bang' added successfully.")
        answers = [one.result() for one in running]
    assert len(set(answers)) == 2
    assert "Wow!" in completion(client, "bang")
    assert names(client)["tiny:bang"] == "tiny"
    taken = client.post("/v1/load_lora_adapter", json=load)
    assert taken.status_code == 400 and "load_inplace" in taken.text
    replaced = {**load, "lora_path": str(trained_dir / UPPER), "load_inplace": True}
    assert client.post("/v1/load_lora_adapter", json=replaced).status_code == 200
    assert completion(client, "bang") == completion(client, "upper")  # and nothing of the old one's cache
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "bang"}).status_code == 200
    assert "tiny:bang" not in names(client)
    assert client.post("/v1/completions", json={"model": "bang", "prompt": ONCE}).status_code == 404
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "bang"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, "does not exist"),
        ({"lora_name": "tiny", "lora_path": "/nowhere"}, "is the name of a model"),
        ({"lora_name": "a b", "lora_path": "/nowhere"}, "is not a valid adapter name"),
    ],
)
def test_wrong_loads_are_refused(client: httpx.Client, body: dict[str, str], said: str) -> None:
    reply = client.post("/v1/load_lora_adapter", json=body)
    assert reply.status_code == 400
    assert said in reply.text


@pytest.mark.slow
def test_adapters_outlive_a_crash_of_the_engine(
    process: ServerProcess, client: httpx.Client, trained_dir: Path
) -> None:
    def is_there() -> bool:
        return client.get("/health").status_code == 200 and "tiny:bang" in names(client)

    load = {"lora_name": "bang", "lora_path": str(trained_dir / BANG)}
    assert client.post("/v1/load_lora_adapter", json=load).status_code == 200
    before = completion(client, "bang")
    os.kill(process.children()[0], signal.SIGKILL)
    for expected in (False, True):  # gone, and there again
        deadline = time.monotonic() + SOON_S
        while is_there() != expected and time.monotonic() < deadline:
            time.sleep(0.02)
    assert completion(client, "bang") == before
    assert completion(client, "upper").isupper()
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "bang"}).status_code == 200
