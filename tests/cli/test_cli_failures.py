"""What can go wrong on a user's machine, met by the real command with a real model: one clear line and an exit code."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cli_process import one_line, real, wait_for_no_engine
from tests.support.timing import eventually

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"half": 0.5, "header only": 0.03, "in the vocabulary": 0.005}


@pytest.mark.parametrize("verb", ["serve", "run"])
@pytest.mark.parametrize("part", SIZES.values(), ids=SIZES.keys())
def test_a_truncated_gguf(
    environment: dict[str, str], tmp_path: Path, smollm2_path: Path, verb: str, part: float
) -> None:
    damaged = tmp_path / "damaged.gguf"
    with smollm2_path.open("rb") as whole:
        damaged.write_bytes(whole.read(int(smollm2_path.stat().st_size * part)))
    arguments = ["run", str(damaged), "hi"] if verb == "run" else ["serve", str(damaged), "--port", "0"]
    one_line(real(environment, *arguments), 1, "damaged.gguf")


def test_serving_on_a_busy_port(environment: dict[str, str], smollm2_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = f"cannot listen on 127.0.0.1:{port}: Address already in use (choose another --port)"
        one_line(real(environment, "serve", str(smollm2_path), "--port", port), 1, told)
    wait_for_no_engine(environment)


def test_a_busy_port_is_known_before_the_engine_is_imported() -> None:
    check = (
        "import sys; from tokenmill.server.listen import bind;bind('127.0.0.1', 0).close(); import tokenmill.cli.serve;"
        "sys.exit(any(name in sys.modules for name in ('uvicorn', 'numpy', 'tokenmill.engine.async_engine')))"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0


def handles_sigterm(pid: int) -> bool:
    """Tell whether a process has a handler for SIGTERM by now."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("after_s", [0.0, 0.3, 1.0])
def test_a_stop_in_the_first_seconds_is_orderly(
    environment: dict[str, str], smollm2_path: Path, after_s: float
) -> None:
    command = [sys.executable, "-m", "tokenmill", "serve", str(smollm2_path), "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert eventually(lambda: handles_sigterm(process.pid)), "Python itself has started"
        time.sleep(after_s)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    wait_for_no_engine(environment)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["./none.gguf"], 1, ["none.gguf"]),
        (["smolm2:135m"], 1, ["did you mean smollm2:135m"]),
        (["--prot", "1"], 2, ["--prot", "--port"]),
        (["--port", "many"], 2, ["--port", "many"]),
        (["--port", "99999"], 2, ["port", "65535", "99999"]),
        (["--keep-alive-s", "0"], 2, ["keep_alive_s", "0.001"]),
        (["--max-runing", "1"], 2, ["--max-running"]),
    ],
)
def test_serving_what_is_not_there(
    environment: dict[str, str], arguments: list[str], code: int, words: list[str]
) -> None:
    one_line(real(environment, "serve", *arguments), code, *words)


def test_an_open_address_leaves_no_engine_behind(environment: dict[str, str], smollm2_path: Path) -> None:
    arguments = ["serve", str(smollm2_path), "--host", "0.0.0.0", "--port", "0"]
    one_line(real(environment, *arguments), 2, "--allow-open")
    wait_for_no_engine(environment)


@pytest.mark.skipif(sys.platform != "linux", reason="small disks are mounted on Linux")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_pulling_to_a_full_disk(environment: dict[str, str], tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("mount is not permitted here")
    try:
        done = real({**environment, "TOKENMILL_HOME": str(small)}, "pull")
        if "could not be pulled" in done.stderr:
            pytest.skip("no source of models can be reached")
        assert done.returncode == 1 and "no space left" in done.stderr.splitlines()[-1], done.stderr
        assert "Traceback" not in done.stderr
        assert sum(path.stat().st_size for path in small.rglob("*") if path.is_file()) == 0
    finally:
        subprocess.run(["umount", str(small)], check=True)
