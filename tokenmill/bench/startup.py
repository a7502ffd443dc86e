"""Benchmark of the start: from a cold process to the first token, by stages.

Each round runs a fresh Python, so that every import counts:

    process ─► import tokenmill ─► import the engine ─► tokenizer, torch, weights ─► first token    `LLM` in Python
    process ─► `tokenmill run` writes the first byte of its answer
    process ─► `tokenmill serve` answers /health with 200

On a busy machine the times grow and the CPU times do not, so the start of the server is reported in both.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tokenmill.bench.measures import median
from tokenmill.engine.core_process import python_command
from tokenmill.errors import RequestFailed

STAGES = ("python_s", "import_s", "engine_import_s", "load_s", "first_token_s", "total_s")
RUN_STAGES = ("run_first_byte_s", "run_end_s")
SERVER_STAGES = ("server_ready_s", "front_cpu_s", "engine_cpu_s")

SCRIPT = """
import json, sys, time
python = time.time()
import tokenmill
imported = time.time()
from tokenmill.engine.llm import LLM
from tokenmill.params import SamplingParams
engine = time.time()
llm = LLM(sys.argv[2], **json.loads(sys.argv[3]))
loaded = time.time()
prompt = "hi" if llm.frontend.tokenizer else [1, 2, 3]
next(iter(llm.stream(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))))
first = time.time()
began = float(sys.argv[1])
print(json.dumps({"python_s": python - began, "import_s": imported - python, "engine_import_s": engine - imported,
                  "load_s": loaded - engine, "first_token_s": first - loaded, "total_s": first - began}))
"""


def measure_start(model: str, settings: dict[str, Any]) -> dict[str, float]:
    done = subprocess.run(
        [*python_command(), "-c", SCRIPT, str(time.time()), model, json.dumps(settings)], capture_output=True, text=True
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RequestFailed(f"the started process failed: {last[0][:300]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure_starts(model: str, settings: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return the medians of several starts; the first one fills the disk cache and is left out if there are more."""
    found = [measure_start(model, settings) for _ in range(rounds)]
    counted = found[1:] if len(found) > 1 else found
    return {stage: median([one[stage] for one in counted]) for stage in STAGES}


# ── an answer on the command line ──────────────────────────────────────────────────────────────────────


def measure_runs(arguments: list[str], rounds: int) -> dict[str, float]:
    """Return the medians of `tokenmill run MODEL hi` with these arguments; the first is left out if there are more."""
    found = [measure_run(arguments) for _ in range(rounds)]
    counted = found[1:] if len(found) > 1 else found
    return {stage: median([one[stage] for one in counted]) for stage in RUN_STAGES}


def measure_run(arguments: list[str]) -> dict[str, float]:
    model, *flags = arguments
    command = [*python_command(), "-m", "tokenmill", "run", model, "hi", "--max-tokens", "2", *flags]
    began = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.read(1)
        first_byte_s = time.monotonic() - began
        run.stdout.read()
    if run.returncode != 0:
        raise RequestFailed(f"the started command ended with exit code {run.returncode}")
    return {"run_first_byte_s": first_byte_s, "run_end_s": time.monotonic() - began}


# ── a server's start ───────────────────────────────────────────────────────────────────────────────────


def measure_server_starts(arguments: list[str], rounds: int) -> dict[str, float]:
    """Return the medians of `tokenmill serve` with these arguments, from process start to readiness."""
    found = [measure_server_start(arguments) for _ in range(rounds)]
    return {stage: median([one[stage] for one in found]) for stage in SERVER_STAGES}


def measure_server_start(arguments: list[str]) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    began = time.monotonic()
    command = [*python_command(), "-m", "tokenmill", "serve", *arguments, "--port", port, "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not _is_ready(port):
                if server.poll() is not None:
                    raise RequestFailed(f"the started server ended with exit code {server.returncode}")
                time.sleep(0.02)
            times = {"server_ready_s": time.monotonic() - began, "front_cpu_s": _cpu_s(server.pid)}
            return {**times, "engine_cpu_s": sum(_cpu_s(child) for child in _children(server.pid))}
        finally:
            server.send_signal(signal.SIGTERM)


def _is_ready(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _cpu_s(pid: int) -> float:
    """Return user and system time of a process so far; 0 where the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
