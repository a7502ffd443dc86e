"""What a step on a GPU consists of: the time of each kernel, told apart by its grid, and the time between kernels."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NAME_WIDTH = 70


@dataclass(frozen=True)
class KernelTime:
    name: str
    grid: tuple[int, ...]
    count: float  # a step
    step_us: float  # of all of them


@dataclass(frozen=True)
class StepKernels:
    kernels: list[KernelTime]  # those that take longest first
    step_us: float  # from the first kernel of a step to the end of its last one
    idle_us: float  # of it, when no kernel runs

    def print(self, most: int = 16) -> None:
        print(f"  {self.step_us:9.1f} us a step, {self.idle_us:.1f} of it between kernels", flush=True)
        for one in self.kernels[:most]:
            each = one.step_us / one.count
            grid = "x".join(map(str, one.grid))
            print(f"  {one.step_us:9.1f} us {one.count:6.1f} times {each:7.2f}  {grid:>12}  {one.name[:NAME_WIDTH]}")


def step_kernels(step: Callable[[], Any], steps: int = 5) -> StepKernels:
    """Run some steps and say which kernels they took how long."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = sorted((one for one in events if one.get("cat") == "kernel"), key=lambda one: float(one["ts"]))
    return summed_up(found, steps)


def summed_up(events: list[dict[str, Any]], steps: int) -> StepKernels:
    """`events`: kernels of a Chrome trace, in the order of their starts."""
    spent: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    busy_us, until_us = 0.0, float("-inf")
    for one in events:
        begin_us, length_us = float(one["ts"]), float(one["dur"])
        spent[one["name"], tuple(one["args"].get("grid", ()))].append(length_us)
        end_us = begin_us + length_us
        busy_us += max(0.0, end_us - max(begin_us, until_us))  # kernels may overlap
        until_us = max(until_us, end_us)
    wall_us = until_us - float(events[0]["ts"]) if events else 0.0
    kernels = [
        KernelTime(name, grid, len(lengths) / steps, sum(lengths) / steps) for (name, grid), lengths in spent.items()
    ]
    kernels.sort(key=lambda one: -one.step_us)
    return StepKernels(kernels, wall_us / steps, (wall_us - busy_us) / steps)
