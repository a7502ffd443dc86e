"""Coding agents from npm, unmodified and offline, against a scripted model: each reads a file by a tool call, writes
another and ends well. The model's answers are written down; everything else is real."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.client_farm import Canary, environment_of, node_program, serving_script
from tests.support.client_scripts import QWEN3, call, script, think

pytestmark = pytest.mark.slow
SECRET = "The mill grinds at noon.\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the agent works in."""
    place = tmp_path / "work"
    place.mkdir()
    (place / "a.txt").write_text(SECRET)
    return place


def require_done(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Copied it." in done.stdout, done.stdout + done.stderr
    assert (folder / "b.txt").read_text() == SECRET


def run(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", [["--bare"], []], ids=["bare", "full prompt"])
def test_claude_code(folder: Path, tmp_path: Path, canary: Canary, shared_dir: Path, mode: list[str]) -> None:
    claude = node_program("claude")
    copy = call("Bash", command="cat a.txt > b.txt", description="Copy the file")
    model = script(
        {"turn": 1, "say": think("First I read it.") + "I read it.\n" + call("Read", file_path=str(folder / "a.txt"))},
        {"turn": 2, "match": "The mill grinds at noon", "say": copy},
        {"turn": 3, "say": think("That was all.") + "Copied it."},
    )
    with serving_script(tmp_path, model, shared_dir / "templates" / QWEN3) as url:
        environment = environment_of(
            tmp_path / "home",
            canary,
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_AUTH_TOKEN="unused",
            ANTHROPIC_MODEL="scripted",
            ANTHROPIC_DEFAULT_HAIKU_MODEL="scripted",
            CLAUDE_CODE_MAX_CONTEXT_TOKENS="131072",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            DISABLE_AUTOUPDATER="1",
        )
        done = run([*claude, *mode, "-p", "Copy a.txt to b.txt", "--allowedTools", "Read,Bash"], folder, environment)
        require_done(done, folder)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("package", ["@ai-sdk/anthropic", "@ai-sdk/openai-compatible"])
def test_opencode(folder: Path, tmp_path: Path, canary: Canary, shared_dir: Path, package: str) -> None:
    opencode = node_program("opencode")
    model = script(
        {"match": "You are a title generator", "say": "Copying a file"},
        {"turn": 1, "say": think("First I read it.") + "I read it.\n" + call("read", filePath=str(folder / "a.txt"))},
        {
            "turn": 2,
            "match": "The mill grinds at noon",
            "say": call("write", filePath=str(folder / "b.txt"), content=SECRET),
        },
        {"turn": 3, "say": think("That was all.") + "Copied it."},
    )
    with serving_script(tmp_path, model, shared_dir / "templates" / QWEN3) as url:
        provider: dict[str, Any] = {
            "npm": package,
            "name": "Tokenmill",
            "options": {"baseURL": f"{url}/v1", "apiKey": "unused"},
            "models": {"scripted": {"name": "Scripted", "limit": {"context": 131072, "output": 8192}}},
        }
        names = {"model": "tokenmill/scripted", "small_model": "tokenmill/scripted"}
        settings = {**names, "autoupdate": False, "share": "disabled", "provider": {"tokenmill": provider}}
        (folder / "opencode.json").write_text(json.dumps(settings))
        environment = environment_of(
            tmp_path / "home",
            canary,
            OPENCODE_DISABLE_MODELS_FETCH="1",
            OPENCODE_DISABLE_AUTOUPDATE="1",
            npm_config_registry="http://127.0.0.1:9",  # it would fetch a library for plugins
        )
        require_done(run([*opencode, "run", "Copy a.txt to b.txt"], folder, environment), folder)
