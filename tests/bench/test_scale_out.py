"""Benchmarks of replicas and pipelines that mean the same on any machine, since models sleep or the clock is virtual:
what they have shown stays true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import ROOT

pytestmark = pytest.mark.slow
NUM_REQUESTS = 4000  # of the trace's 12,031, over which an unlimited cache would find more again
LIMIT_S = 600
FIGURE = re.compile(r"(\S.*?) (\d+\.\d+)\s")


def printed(name: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / name), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout.splitlines()


def figures(lines: list[str], name: str) -> dict[str, float]:
    """The figures of a line such as `seconds  hit rate 0.354  fullest/mean 1.006  p99 TTFT s 0.114  (40 s to run)`."""
    (line,) = (line.removeprefix(name) for line in lines if line.startswith(name))
    found = FIGURE.findall(line.split("(")[0])
    return {what: float(value) for what, value in found}


def test_a_trace_of_conversations_finds_its_prompts_again(shared_dir: Path) -> None:
    trace = shared_dir / "traces" / "conversation_trace.jsonl"
    lines = printed("fleet_routing.py", str(trace), "--requests", str(NUM_REQUESTS))
    turns, chosen = figures(lines, "round robin"), figures(lines, "seconds")
    assert chosen["hit rate"] >= 1.6 * turns["hit rate"] > 0.2
    assert chosen["fullest/mean"] <= 1.10
    assert chosen["p99 TTFT s"] <= 0.75 * turns["p99 TTFT s"]


def test_choosing_a_replica_takes_little_of_the_front() -> None:
    found: dict[str, Any] = json.loads(printed("route_choice.py", "--times", "20")[-1])
    assert len(found) == 4 and all(case["p50 ms"] <= 1.5 for case in found.values()), found


def test_stages_work_at_the_same_time() -> None:
    found: dict[str, Any] = json.loads(printed("pipeline.py", "--stage-ms", "100", "--steps", "30")[-1])
    assert found["pp2"]["busy"] >= 0.85 and found["pp2"]["one_lane_busy"] <= 0.55
    assert all(found[f"pp{stages}"]["speedup"] >= 0.9 * stages for stages in (2, 3, 4)), found
    assert found["long"]["ratio"] >= 3.0
