"""Fill in the middle with a real model for code, through every route that has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess, real_server

PREFIX = """def quicksort(arr):
    if len(arr) <= 1:
        return arr
    pivot = arr[len(arr) // 2]
"""
LINE = "    left = "
SUFFIX = """
    middle = [x for x in arr if x == pivot]
    right = [x for x in arr if x > pivot]
    return quicksort(left) + middle + quicksort(right)
"""
EXPECTED = "[x for x in arr if x < pivot]"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def coder(qwen_coder_path: Path) -> Iterator[ServerProcess]:
    with real_server(qwen_coder_path, num_blocks=64) as process:
        process.wait_for("ready", within_s=120)
        yield process


def test_completions(coder: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": PREFIX + LINE, "suffix": SUFFIX, "max_tokens": 32, "temperature": 0}
    choice = coder.http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"].strip(), choice["finish_reason"]) == (EXPECTED, "stop")


def test_infill(coder: ServerProcess) -> None:
    body = {"input_prefix": PREFIX, "prompt": LINE, "input_suffix": SUFFIX, "n_predict": 32, "temperature": 0}
    reply = coder.http.post("/infill", json=body).json()
    assert (reply["content"].strip(), reply["stop_type"]) == (EXPECTED, "eos")


def test_ollama(coder: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": PREFIX + LINE, "suffix": SUFFIX, "stream": False, "options": {"temperature": 0}}
    assert coder.http.post("/api/generate", json=body).json()["response"].strip() == EXPECTED
