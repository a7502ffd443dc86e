"""Ten recorded minutes of Azure's conversations, replayed on a real server of the default model; the report, seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.browser import ReportPage, open_chromium
from tests.support.server_process import free_port
from tokenmill.cli import main

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def server(model: Path, log: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "tokenmill", "serve", str(model), "--port", str(port), "--num-blocks", "2048"]
    with log.open("w") as printed:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdout=printed, stderr=printed, env=environment)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.mark.slow
def test_ten_minutes_of_conversations(
    shared_dir: Path, smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty times as fast, a tenth of the requests, prompts and answers a twentieth as long: about ten a second."""
    trace, result, page = (
        shared_dir / "traces" / "AzureLLMInferenceTrace_conv.csv",
        tmp_path / "a.json",
        tmp_path / "a.html",
    )
    replay = ["--trace", str(trace), "--trace-s", "600", "--time-scale", "0.05", "--trace-share", "0.1"]
    more = ["--length-scale", "0.05", "--max-lag-ms", "2000", "--output", str(result), "--html", str(page)]
    with server(smollm2_path, tmp_path / "log") as url:
        assert main(["bench", "serve", "--url", url, *replay, *more]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["failed"] == 0 and found["completed"] > 200 and found["tokens_from"] == "usage"
    assert found["span_s"] > 25
    with open_chromium() as chromium:
        assert ReportPage(chromium, page).look(1400, "light") == []
