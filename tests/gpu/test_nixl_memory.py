"""Blocks that two processes read from each other's GPU memory by NIXL; both are on one GPU here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tokenmill.kv.tiers import nixl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not nixl.is_installed(), reason='needs `pip install "tokenmill[nixl]"`'),
]
LIMIT_S = 120.0


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.nixl_program", *arguments]
    environment = {**os.environ, "NIXL_PROGRAM_DEVICE": "cuda:0"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def test_blocks_of_another_process_are_read_on_the_gpu() -> None:
    with TemporaryDirectory(prefix="tm-") as folder:
        address = str(Path(folder) / "blocks")
        serving = started("serve", address)
        try:
            assert serving.stdout is not None and serving.stdout.readline() == "ready\n"
            reading = started("read", address)
            output, _ = reading.communicate(timeout=LIMIT_S)
            assert reading.returncode == 0
            told = json.loads(output)
            assert told["whole"] == [True] * 60 and told["absent"]
        finally:
            serving.kill()
            serving.communicate()
