"""`tokenmill up --search`: measure the best topologies of a plan and choose the one that serves the largest load.

Each of the best three is started like `tokenmill up --take` on its own port, `tokenmill bench search` finds the largest
load that it serves within the latency targets, and it is stopped.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.cli.output import print_table
from tokenmill.config.cluster import ExpectedLoad
from tokenmill.config.promises import read_service_level
from tokenmill.engine.core_process import python_command
from tokenmill.errors import InvalidConfig

if TYPE_CHECKING:
    from tokenmill.planner.topologies import Topology

NUM_MEASURED = 3
START_S = 600.0
READY_CHECK_S = 0.2
END_S = 30.0
OWN_FLAGS = ("--search", "--dry-run")
QUIETLY = ("--log-level", "error", "--host", "127.0.0.1")
TITLES = ("replicas", "tp", "planned requests/s", "measured", "at concurrency", "")


@dataclass(frozen=True)
class HeldLoad:
    """The largest load that a topology serves within the latency targets."""

    topology: Topology
    requests_s: float | None  # None: not even a single request meets them
    concurrency: float | None


def best_of(path: Path, found: Sequence[Topology], load: ExpectedLoad, slo: str | None, num_trials: int) -> str:
    """Return the name of the topology that serves the largest load. `found`: planned topologies, the best first."""
    tried = [one for one in found if not one.why_not][:NUM_MEASURED]
    if not tried:
        raise InvalidConfig(f"no topology meets the requirements: {found[0].name} {found[0].why_not}", param="search")
    measured = []
    for one in tried:
        print(f"Measuring {one.num_replicas} replicas of {one.ranks} …", flush=True)
        with started(path, one.name) as url:
            measured.append(held_by(one, url, load, slo, num_trials))
    best = max(measured, key=lambda one: one.requests_s or 0.0)
    print_table(TITLES, [row(one, is_best=one is best) for one in measured])
    if best.requests_s is None:
        print("None of them meets the latency targets as measured; using the planner's choice.", flush=True)
        return tried[0].name
    return best.topology.name


def row(one: HeldLoad, *, is_best: bool) -> tuple[str, ...]:
    return (
        str(one.topology.num_replicas),
        str(one.topology.tp),
        f"{one.topology.requests_s:.2f}",
        "–" if one.requests_s is None else f"{one.requests_s:.2f}",
        "–" if one.concurrency is None else f"{one.concurrency:g}",
        "taken" if is_best and one.requests_s is not None else "",
    )


@contextmanager
def started(path: Path, name: str) -> Iterator[str]:
    """Run a cluster of one topology inside the context; yield the URL of its front end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [argument for argument in sys.argv[2:] if argument not in OWN_FLAGS]
    asked = [*arguments, *QUIETLY, "--take", name, "--port", str(port)]
    child = subprocess.Popen([*python_command(), "-m", "tokenmill", "up", *asked], stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(child, url, path)
        yield url
    finally:
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_until_ready(child: subprocess.Popen[bytes], url: str, path: Path) -> None:
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s:
        if child.poll() is not None:
            raise InvalidConfig(f"the cluster of {path} ended with exit code {child.returncode} during its measurement")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=READY_CHECK_S + 5.0):
                return
        except (urllib.error.URLError, OSError):  # not listening yet, or still loading
            time.sleep(READY_CHECK_S)
    raise InvalidConfig(f"the cluster of {path} was not ready within {START_S:.0f} s")


def held_by(one: Topology, url: str, load: ExpectedLoad, slo: str | None, num_trials: int) -> HeldLoad:
    """Measure a topology with `tokenmill bench search`."""
    asked = [
        *("bench", "search", "--url", url, "--json", "--trials", str(num_trials), "--noisy-s", "0"),
        *("--input-len", str(load.input_len), "--output-len", str(load.output_len)),
    ]
    done = subprocess.run(
        [*python_command(), "-m", "tokenmill", *asked, *limits(slo)], stdout=subprocess.PIPE, text=True
    )
    lines = done.stdout.strip().splitlines()
    if not lines:
        raise InvalidConfig(f"bench search ended with exit code {done.returncode} without a result")
    found: dict[str, Any] = json.loads(lines[-1])
    held = [trial for trial in found["trials"] if trial["passed"]]
    if not held:
        return HeldLoad(one, None, None)
    best = max(held, key=lambda trial: float(trial["requests_s"]))
    return HeldLoad(one, float(best["requests_s"]), float(best["level"]))


def limits(slo: str | None) -> list[str]:
    """Return latency targets as limits of a search."""
    promised = read_service_level(slo)
    named = (("ttft", promised.ttft_s), ("tpot", promised.tpot_s))
    given = [f"{name}_p95={seconds * 1e3:g}ms" for name, seconds in named if seconds is not None]
    return ["--slo", ",".join(given)] if given else []
