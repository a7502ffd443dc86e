"""Anthropic's SDK of both generations, each in an environment of its own, against a scripted model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.client_farm import CLIENTS, Canary, environment_of, python_with, serving_script
from tests.support.client_scripts import QWEN3, call, script, think

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
SCRIPT = script(
    {"match": "22 degrees", "say": think("The tool knows.") + "It is 22 degrees in Zürich."},
    {"match": "weather in Zürich", "say": "I look it up.\n" + call("weather", city="Zürich")},
    {"match": "Think hard", "say": think("One, two, three.") + "Three."},
    {"match": "Say hello", "say": "Hello, hello."},
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, shared_dir: Path) -> Iterator[str]:
    with serving_script(tmp_path_factory.mktemp("served"), SCRIPT, shared_dir / "templates" / QWEN3) as started:
        yield started


@pytest.mark.parametrize("generation", ["new", "old"])
def test_a_session(generation: str, url: str, canary: Canary, tmp_path: Path) -> None:
    python = Path(sys.executable) if generation == "new" else python_with("old")
    program = CLIENTS / "programs" / "anthropic_session.py"
    done = subprocess.run(
        [str(python), str(program), url],
        env=environment_of(tmp_path / "home", canary),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["version"].startswith("0." if generation == "old" else "2.")
    assert told["text"] == [{"type": "text", "text": "Hello, hello."}]
    assert told["stop"] == ["end_turn", "tool_use", "end_turn", "end_turn"]
    assert told["call"] == ["weather", {"city": "Zürich"}]
    assert [block["type"] for block in told["answer"]] == ["thinking", "text"]
    assert told["answer"][-1]["text"] == "It is 22 degrees in Zürich."
    assert told["thought"] == [["thinking", "One, two, three."], ["text", "Three."]]
    assert told["models"] == ["scripted"]
