"""Clients in JavaScript against a scripted model: the makers' own SDKs, and the AI SDK over all dialects."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.client_farm import Canary, environment_of, node_modules, serving_script
from tests.support.client_scripts import QWEN3, call, script, think

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
SCRIPT = script(
    {"match": "22 degrees", "say": think("The tool knows.") + "It is 22 degrees in Zürich."},
    {"match": "weather in Zürich", "say": "I look it up.\n" + call("weather", city="Zürich")},
    {"match": '(?s)"name": "json".*as JSON', "say": call("json", city="Zürich")},  # a form asked for as a tool
    {"match": "as JSON", "say": '{"city": "Zürich"}'},
    {"match": "Say hello", "say": "Hello, hello."},
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, shared_dir: Path) -> Iterator[str]:
    with serving_script(tmp_path_factory.mktemp("served"), SCRIPT, shared_dir / "templates" / QWEN3) as started:
        yield started


def run(program: str, url: str, home: Path, canary: Canary) -> dict[str, Any]:
    """What a program prints, run beside the packages that it imports."""
    node, place = node_modules()
    done = subprocess.run(
        [str(node), str(place / "programs" / program), url],
        env=environment_of(home, canary),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_the_makers_sdks(url: str, canary: Canary, tmp_path: Path) -> None:
    told = run("javascript_sdks.mjs", url, tmp_path, canary)
    library = told.pop("library")
    assert library["shaped"] == {"city": "Zürich"} and library["generated"] == "Hello, hello."
    assert library["listed"] == library["running"] == ["scripted:latest"]
    assert {"completion", "tools", "thinking"} <= set(library["capabilities"])
    assert len(set(library["widths"])) == 1 and len(library["widths"]) == 2
    assert set(told) == {"anthropic", "openai", "responses", "ollama"}
    for name, one in told.items():
        assert one["text"] == "Hello, hello.", name
        assert one["call"][:2] == ["weather", {"city": "Zürich"}], name
        assert one["answer"] == "It is 22 degrees in Zürich.", name
    assert {told[name]["thought"] for name in told if name != "openai"} == {"The tool knows."}
    assert [told[name]["call"][2] for name in ("anthropic", "openai")] == ["tool_use", "tool_calls"]
    assert len({one["tokens"] for one in told.values()}) == 1, "a conversation counts alike in all dialects"


def test_the_ai_sdk(url: str, canary: Canary, tmp_path: Path) -> None:
    told = run("ai_sdk.mjs", url, tmp_path, canary)
    assert set(told) == {"anthropic", "openai", "responses", "ollama"}
    for name, one in told.items():
        assert (one["text"], one["finish"]) == ("Hello, hello.", "stop"), name
        assert one["calls"] == [["weather", {"city": "Zürich"}]], name
        assert one["streamed"].endswith("It is 22 degrees in Zürich."), name
        assert one["thought"] == "The tool knows.", name
        assert one["shaped"] == {"city": "Zürich"}, name
    assert told["anthropic"]["tokens"] == told["openai"]["tokens"] == told["responses"]["tokens"], (
        "Ollama's provider switches thinking off"
    )
