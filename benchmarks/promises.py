"""Where admission begins to refuse, beside the edge that `bench search` finds, and what is answered in time beyond it.

    python benchmarks/promises.py MODEL [--slo ttft=1s,tpot=60ms] [--seconds 14] [--trials 12]

    edge        a server that promises no time to the first token, and so refuses nobody: the highest rate of requests
                at which 19 of 20 are answered within the times, by the search of `bench search`
    admission   a server that promises both: the highest rate at which 19 of 20 are admitted and answered in time, by
                the same search; and at parts of that rate, how many a second are answered in time (goodput)

Requests come at random (Poisson), with prompts of 50 to 350 random tokens and answers of 10 to 50. Asked: the two
edges are within 10 % of each other; at 1.5 times the edge goodput is at least 90 % of its peak. Prints a line a trial
and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass

from served import Served

from tokenmill.bench.client import Client
from tokenmill.bench.dialects import RequestSpec, find_dialect
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.search import SearchSettings, Trial, Verdict, search
from tokenmill.config.promises import ServiceLevel, read_service_level

PARTS = (0.9, 1.0, 1.1, 1.25, 1.5)
WARM_UP_S = 2.0
DRAIN_S = 2.5
LATE_PART = 0.05
REFUSED = 429


@dataclass(frozen=True)
class Outcome:
    """What became of the requests that were sent when all was warm."""

    rate: float
    num_sent: int
    num_refused: int
    num_kept: int  # answered as promised
    goodput: float  # of those, a second

    @property
    def late_part(self) -> float:
        return 1.0 - self.num_kept / max(1, self.num_sent)

    @property
    def refused_part(self) -> float:
        return self.num_refused / max(1, self.num_sent)


async def ask(client: Client, began: float, rng: random.Random, found: list[BenchRecord]) -> None:
    num_prompt, num_output = rng.randint(50, 350), rng.randint(10, 50)
    ids = tuple(rng.randrange(100, 4000) for _ in range(num_prompt))
    spec = RequestSpec(messages=(), output_len=num_output, input_len=num_prompt, prompt_ids=ids)
    record = BenchRecord()
    found.append(record)
    body = client.encode(spec)
    record.sent_s = time.perf_counter() - began
    await client.fetch(body, record, 60.0)


def keeps(record: BenchRecord, level: ServiceLevel) -> bool:
    assert level.ttft_s is not None and level.tpot_s is not None
    is_answered = record.is_ok and record.finish_reason is not None
    return is_answered and record.ttft_s <= level.ttft_s and (record.tpot_s or 0.0) <= level.tpot_s


async def load(server: Served, rate: float, seconds: float, level: ServiceLevel, seed: int) -> Outcome:
    """Send requests at a rate for so many seconds; those that are not answered soon after count as late."""
    rng = random.Random(seed)
    began = time.perf_counter()
    client = Client(server.url, find_dialect("openai-completions"), "m", None, began)
    found: list[BenchRecord] = []
    tasks: list[asyncio.Task[None]] = []
    next_s = rng.expovariate(rate)
    while next_s < seconds:
        await asyncio.sleep(max(0.0, next_s - (time.perf_counter() - began)))
        tasks.append(asyncio.create_task(ask(client, began, rng, found)))
        next_s += rng.expovariate(rate)
    await asyncio.wait(tasks, timeout=DRAIN_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    client.close()
    counted = [one for one in found if one.sent_s > WARM_UP_S]
    num_kept = sum(keeps(one, level) for one in counted)
    refused = sum(one.status == REFUSED for one in counted)
    outcome = Outcome(rate, len(counted), refused, num_kept, num_kept / (seconds - WARM_UP_S))
    print(
        f"{rate:6.2f}/s  {outcome.num_sent:4d} sent  {outcome.refused_part:6.1%} refused  "
        f"{outcome.late_part - outcome.refused_part:6.1%} late  goodput {outcome.goodput:.2f}/s",
        flush=True,
    )
    await asyncio.to_thread(server.wait_idle)
    return outcome


def find_edge(server: Served, level: ServiceLevel, asked: argparse.Namespace) -> Verdict:
    """The highest rate at which 19 of 20 requests are answered in time."""

    def try_rate(rate: float) -> Trial:
        outcome = asyncio.run(load(server, rate, asked.seconds, level, seed=1))
        is_late = outcome.late_part > LATE_PART
        return Trial(rate, not is_late, {}, "late" if is_late else "", outcome.num_sent)

    asyncio.run(load(server, asked.start, 4.0, level, seed=2))  # the first steps: what they cost is learned
    settings = SearchSettings(start=asked.start, most=256.0, is_whole=False, most_trials=asked.trials)
    verdict = search(try_rate, settings)
    if verdict.best is None:
        raise SystemExit("no rate is held: promise more time")
    low, high = verdict.likely
    print(f"edge {verdict.best:.2f}/s (nine times in ten {low:.2f} to {high:.2f})", flush=True)
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--slo", default="ttft=1s,tpot=60ms")
    parser.add_argument("--seconds", type=float, default=14.0, help="of one trial")
    parser.add_argument("--trials", type=int, default=12, help="to find each edge")
    parser.add_argument("--start", type=float, default=4.0, help="the first rate")
    asked = parser.parse_args()
    level = read_service_level(asked.slo)
    if level.ttft_s is None or level.tpot_s is None:
        raise SystemExit("--slo takes both: ttft and tpot")
    flags = ("--max-running", "64", "--speculate", "off", "--slo")
    with Served(asked.model, *flags, f"tpot={level.tpot_s}s") as server:
        edge = find_edge(server, level, asked)
    with Served(asked.model, *flags, asked.slo) as server:
        admitted = find_edge(server, level, asked)
        assert edge.best is not None and admitted.best is not None
        found = {part: asyncio.run(load(server, part * edge.best, asked.seconds, level, seed=3)) for part in PARTS}
    peak = max(one.goodput for one in found.values())
    print(
        json.dumps(
            {
                "benchmark": "promises",
                "slo": asked.slo,
                "edge": round(edge.best, 2),
                "edge_likely": [round(one, 2) for one in edge.likely],
                "edge_of_admission": round(admitted.best, 2),
                "edge_of_admission_likely": [round(one, 2) for one in admitted.likely],
                "edges_ratio": round(admitted.best / edge.best, 3),
                "refused": {str(part): round(one.refused_part, 3) for part, one in found.items()},
                "goodput": {str(part): round(one.goodput, 2) for part, one in found.items()},
                "goodput_beyond": round(found[1.5].goodput / peak, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
