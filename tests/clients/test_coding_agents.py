"""Coding agents from npm, unmodified and offline, against a scripted model: each reads a file by a tool call, writes
another and ends well. The model's answers are written down; everything else is real."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.client_farm import CLIENTS, Canary, environment_of, node_program, script_process, serving_script
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


def run(
    command: list[str], folder: Path, environment: dict[str, str], typed: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        input=typed,
        capture_output=True,
        text=True,
        timeout=240,
    )


def claude_environment(home: Path, canary: Canary, url: str, context: int = 131_072) -> dict[str, str]:
    return environment_of(
        home,
        canary,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="unused",
        ANTHROPIC_MODEL="scripted",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="scripted",
        CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(context),
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )


def require_prefix_hits(log: str) -> None:
    """Every request finds the prompt of the one before it in the cache, but for the last block of tokens."""
    counted = re.findall(r"prompt_tokens=(\d+) .*?cached_tokens=(\d+)", log)
    assert len(counted) == 3, log
    for (before, _), (_, cached) in pairwise(counted):
        assert int(cached) > int(before) - 300, counted


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
    with script_process(tmp_path, model, shared_dir / "templates" / QWEN3) as server:
        environment = claude_environment(tmp_path / "home", canary, server.url)
        done = run([*claude, *mode, "-p", "Copy a.txt to b.txt", "--allowedTools", "Read,Bash"], folder, environment)
        require_done(done, folder)
        require_prefix_hits(server.output())


@pytest.mark.timeout(1500)
def test_claude_code_reads_why_a_request_does_not_fit(
    folder: Path, tmp_path: Path, canary: Canary, shared_dir: Path
) -> None:
    """The agent assumes a larger context than the server has. Told that the answer has too little room, it asks for
    less; told that the prompt is too long, it says so with both numbers."""
    context = 131_072  # a token is a byte here
    claude = [*node_program("claude"), "--bare", "-p"]
    with script_process(tmp_path, script({"say": "Understood."}), shared_dir / "templates" / QWEN3) as server:
        environment = claude_environment(tmp_path / "home", canary, server.url, context=1_000_000)
        run(claude, folder, environment, "x")
        num_around = int(re.findall(r"prompt_tokens=(\d+)", server.output())[-1]) - 1
        asked_less = run(claude, folder, environment, "x" * (context - num_around - 7000))
        assert (asked_less.returncode, asked_less.stdout.strip()) == (0, "Understood."), asked_less.stderr
        statuses = re.findall(r"path=/v1/messages status=(\d+)", server.output())
        assert statuses == ["200", "400", "200"], "refused, and asked again with less"
        too_long = run(claude, folder, environment, "x" * context)
        assert too_long.returncode == 1 and "Prompt is too long" in too_long.stdout
        assert f"limit {context - 1}" in too_long.stdout


CODEX_SETTINGS = """
model = "{model}"
model_provider = "tokenmill"
model_context_window = 131072
check_for_update_on_startup = false
analytics.enabled = false
features = {{ plugins = false, apps = false }}
model_providers.tokenmill = {{ name = "Tokenmill", base_url = "{url}/v1", wire_api = "responses" }}
mcp_servers.notes = {{ command = "{python}", args = ["{notes}"], default_tools_approval_mode = "approve" }}
"""


def run_codex(folder: Path, home: Path, canary: Canary, url: str, model: str) -> None:
    environment = environment_of(home, canary, CODEX_HOME=str(home))
    notes = CLIENTS / "programs" / "mcp_notes.py"
    settings = CODEX_SETTINGS.format(model=model, url=url, python=sys.executable, notes=notes)
    (home / "config.toml").write_text(settings)
    options = ["--skip-git-repo-check", "--sandbox", "danger-full-access"]
    done = run([*node_program("codex"), "exec", *options, "Copy a.txt to b.txt"], folder, environment)
    require_done(done, folder)


@pytest.mark.timeout(1500)
def test_codex(folder: Path, tmp_path: Path, canary: Canary, shared_dir: Path) -> None:
    model = script(
        {"turn": 1, "say": think("First I read it.") + "I read it.\n" + call("exec_command", cmd="cat a.txt")},
        {"turn": 2, "match": "The mill grinds at noon", "say": call("exec_command", cmd="cat a.txt > b.txt")},
        {"turn": 3, "match": "First I read it", "say": think("That was all.") + "Copied it."},
    )
    with script_process(tmp_path, model, shared_dir / "templates" / QWEN3) as server:
        run_codex(folder, tmp_path / "home", canary, server.url, "scripted")
        require_prefix_hits(server.output())


@pytest.mark.timeout(1500)
def test_codex_with_the_tools_of_a_model_that_it_knows(
    folder: Path, tmp_path: Path, canary: Canary, shared_dir: Path
) -> None:
    """The agent sends all kinds of tools: it searches for one of an MCP server, calls that in its namespace, and writes
    by `apply_patch`, whose input follows a grammar."""
    patch = f"*** Begin Patch\n*** Add File: b.txt\n+{SECRET}*** End Patch"
    model = script(
        {"turn": 1, "say": call("tool_search", query="read a note")},
        {"turn": 2, "match": "Available now: mcp__notes__read_note", "say": call("mcp__notes__read_note", title="a")},
        {"turn": 3, "match": "note a: the mill rests", "say": call("apply_patch", input=patch)},
        {"turn": 4, "match": "Updated the following files", "say": "Copied it."},
    )
    template = shared_dir / "templates" / QWEN3
    with script_process(tmp_path, model, template, "--served-name", "gpt-5.5") as server:
        run_codex(folder, tmp_path / "home", canary, server.url, "gpt-5.5")


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
