"""Does compiling a hard schema delay others? 15 answers stream while hard schemas, never seen before, keep arriving.

    python benchmarks/guided_compile_stall.py [--model MODEL] [--seconds 20] [--every-s 0.5]

Calm and busy seconds take turns in one run, so that what else the machine does falls on both. Prints the time between
tokens in each (median, 99th percentile) and one JSON object as the last line; fails when the 99th percentile doubles.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from typing import Any

from tokenmill.config import EngineConfig, ModelConfig
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.errors import InvalidRequest
from tokenmill.params import Guided, SamplingParams
from tokenmill.types import PromptRequest

NUM_STREAMS = 15
PHASE_S = 2.0
MAX_RATIO = 2.0


def hard_schema(number: int) -> dict[str, Any]:
    """Hundreds of optional properties with patterns: about the hardest that is not refused."""
    properties = {
        f"property_{number}_{i}": {"type": "string", "pattern": f"^[a-z]{{3,{20 + i % 30}}}-[0-9]{{2,9}}(x{i}|y{i})?$"}
        for i in range(250)
    }
    return {"type": "object", "properties": properties, "required": [f"property_{number}_249"]}


class StreamGaps:
    """Times between the tokens of all streams, by phase."""

    def __init__(self, engine: AsyncEngine, began_s: float, until_s: float) -> None:
        self._engine = engine
        self._began_s, self._until_s = began_s, until_s
        self.gaps: dict[str, list[float]] = {"calm": [], "busy": []}

    def phase(self, now_s: float) -> str:
        return "busy" if int((now_s - self._began_s) / PHASE_S) % 2 else "calm"

    async def run(self, number: int) -> None:
        while time.monotonic() < self._until_s:
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=200)
            last_s: float | None = None
            async for _ in self._engine.submit(PromptRequest(prompt=f"Story number {number}: once", params=params)):
                now_s = time.monotonic()
                if last_s is not None and self.phase(last_s) == self.phase(now_s):
                    self.gaps[self.phase(now_s)].append(now_s - last_s)
                last_s = now_s


async def compile_all(engine: AsyncEngine, streams: StreamGaps, until_s: float, every_s: float) -> list[float]:
    """In busy seconds a new hard schema again and again; how long each took."""
    seconds: list[float] = []
    while (now_s := time.monotonic()) < until_s:
        if streams.phase(now_s) == "busy":
            guided = Guided.schema(hard_schema(len(seconds)))
            asked = PromptRequest(prompt="{", params=SamplingParams(guided=guided, max_tokens=1))
            with contextlib.suppress(InvalidRequest):  # too late on a machine that is too busy: compiled all the same
                async for _ in engine.submit(asked):
                    pass
            seconds.append(time.monotonic() - now_s)
        await asyncio.sleep(every_s)
    return seconds


async def measure(model: str, seconds: float, every_s: float) -> tuple[StreamGaps, list[float]]:
    engine = await AsyncEngine.start(EngineConfig(ModelConfig(model=model)))
    try:
        warm = SamplingParams(guided=Guided("json_object"), max_tokens=2)
        async for _ in engine.submit(PromptRequest(prompt="{", params=warm)):
            pass  # the vocabulary is loaded with the first grammar
        began_s = time.monotonic()
        streams = StreamGaps(engine, began_s, began_s + seconds)
        running = [asyncio.create_task(streams.run(number)) for number in range(NUM_STREAMS)]
        compiled = await compile_all(engine, streams, began_s + seconds, every_s)
        await asyncio.gather(*running)
        return streams, compiled
    finally:
        await engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--every-s", type=float, default=0.5)
    asked = parser.parse_args()
    streams, compiled = asyncio.run(measure(asked.model, asked.seconds, asked.every_s))
    p99 = {}
    for phase, gaps in streams.gaps.items():
        p99[phase] = statistics.quantiles(gaps, n=100)[98]
        median = statistics.median(gaps)
        print(f"{phase}: {len(gaps)} gaps, median {median * 1e3:.1f} ms, 99th percentile {p99[phase] * 1e3:.1f} ms")
    print(f"{len(compiled)} hard schemas, answered after {statistics.median(compiled):.2f} s (median)")
    ratio = p99["busy"] / p99["calm"]
    print(json.dumps({"p99_ratio": round(ratio, 2), "schemas": len(compiled), "passed": ratio < MAX_RATIO}))
    return 0 if ratio < MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
