"""A thousand streams at once, each on a schedule that is known: does the load generator see what was written?

Requests start evenly over a second, so that all thousand run together and their pieces come at different moments: a
stub that had to write a thousand pieces in the same moment would be late itself. On a shared machine something else has
a processor now and then, for milliseconds; both sides tell when (wall time that was not spent computing), and what fell
into such a moment is left out, half of all at most. Our own slowness is computing, so it can't hide there. A round that
was disturbed is repeated; figures of all rounds are printed (`pytest -s`).
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np
import pytest

from tokenmill.bench.lag import Interval
from tokenmill.bench.load import LoadRun, OpenLoop, Target, run_load
from tokenmill.bench.measures import percentile
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.totals import in_flight
from tokenmill.bench.traffic import Lengths
from tokenmill.bench.workloads import Workload

STREAMS, TTFT_S, ITL_S, TOKENS = 1000, 1.5, 0.1, 20
ROUNDS = 8
ALLOWED_MS = 2.0


@dataclass(frozen=True)
class Errors:
    """99th percentiles in milliseconds."""

    ttft_ms: float  # against the schedule
    itl_ms: float
    seen_ms: float  # after the moment the stub wrote
    stub_ms: float  # the stub's own lateness
    lag_ms: float
    left_out: float  # share of the pieces that fell into a moment without processor

    @property
    def worst_ms(self) -> float:
        return max(self.ttft_ms, self.itl_ms) if self.left_out < 0.5 else float("inf")


def p99_ms(seconds: list[float]) -> float:
    return 1e3 * percentile(np.abs(seconds), 99)


def errors(run: LoadRun, stolen: list[Interval]) -> Errors:
    assert run.lag is not None
    ttft, itl, late, stub_late, left_out = [], [], [], [], 0
    for record in run.records:
        due = [record.sent_s + TTFT_S + number * ITL_S for number in range(TOKENS)]
        written = written_s(record, run)
        is_clean = [not meets(at, seen, stolen) for at, seen in zip(due, record.times_s, strict=True)]
        is_asked_clean = not meets(record.sent_s, written[0] - TTFT_S + 0.001, stolen)
        if is_clean[0] and is_asked_clean:
            ttft.append(record.ttft_s - TTFT_S)
        itl += [gap - ITL_S for gap, a, b in zip(record.gaps_s, is_clean, is_clean[1:], strict=False) if a and b]
        late += [seen - wrote for seen, wrote, clean in zip(record.times_s, written, is_clean, strict=True) if clean]
        stub_late += [wrote - at for wrote, at, clean in zip(written, due, is_clean, strict=True) if clean]
        left_out += TOKENS - sum(is_clean)
    share = left_out / (STREAMS * TOKENS)
    return Errors(p99_ms(ttft), p99_ms(itl), p99_ms(late), p99_ms(stub_late), run.lag.p99_ms, share)


def meets(start: float, end: float, stolen: list[Interval]) -> bool:
    return any(start < until and since < end for since, until in stolen)


def written_s(record: BenchRecord, run: LoadRun) -> list[float]:
    assert record.texts is not None
    return [float(text) - run.began for text in record.texts]


def one_round(url: str) -> Errors:
    sessions = islice(Workload(input_len=Lengths(4, 4), output_len=Lengths(8, 8)).sessions(), STREAMS)
    timed = [(number / STREAMS, session) for number, session in enumerate(sessions)]
    run = run_load(Target(url, "stub"), OpenLoop(timed), keep_texts=True)
    assert all(record.is_ok and len(record.times_s) == TOKENS for record in run.records)
    assert max(running for _, running in in_flight(run.records)) == STREAMS
    with urllib.request.urlopen(f"{url}/stolen", timeout=10) as reply:
        theirs = [(start - run.began, end - run.began) for start, end in json.load(reply)]
    return errors(run, [*run.stolen, *theirs])


@pytest.mark.slow
@pytest.mark.serial
def test_times_match_the_schedule_with_1000_streams(stub: Callable[..., str]) -> None:
    url = stub(ttft=TTFT_S, itl=ITL_S, tokens=TOKENS)
    rounds: list[Errors] = []
    while not rounds or (min(e.worst_ms for e in rounds) > ALLOWED_MS and len(rounds) < ROUNDS):
        rounds.append(one_round(url))
        print({name: round(value, 3) for name, value in asdict(rounds[-1]).items()})
    assert min(e.worst_ms for e in rounds) < ALLOWED_MS, rounds
