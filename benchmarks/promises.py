"""The edge that `bench search` finds beside the one from which admission refuses, and what is answered in time beyond.

    python benchmarks/promises.py MODEL [--slo ttft=2s,tpot=80ms] [--stage edge|admission|beyond] [--folder FOLDER]

    edge        a server that promises no time to the first token, and so refuses nobody: the highest rate of requests
                that it answers within the times (19 of 20), by `bench search`
    admission   a server that promises both, which refuses those whose first token would be late: the highest rate at
                which it refuses one in a hundred at the most, by the same search
    beyond      at parts of the first rate, the second server: how many are refused, and how many a second are answered
                in time (goodput)

Requests come at random (Poisson), and no two have a prompt in common: nothing comes from the prefix cache. Asked: the
two edges are within 10 % of each other; at 1.5 times the edge goodput is at least 90 % of its peak. Trials are kept in
the folder, so that a search goes on where it stopped and stages may run one after another. The last line is one JSON
object of all that is known.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from served import BenchmarkServer

from tokenmill.bench.load import Target
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.search import SearchSettings, Trial, Verdict, read_trials, search, write_trials
from tokenmill.bench.totals import meets, parse_goodput
from tokenmill.cli.bench_load import RunConfig, WorkloadConfig
from tokenmill.cli.bench_serve import ArrivalConfig, SearchConfig, trier
from tokenmill.config.promises import ServiceLevel, read_service_level

STAGES = ("edge", "admission", "beyond")
PARTS = (0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
MEASURED = RunConfig(max_lag_ms=500.0)  # client and server share the processors
RESOLUTION = 0.03
REFUSED = 429


def limits(level: ServiceLevel) -> str:
    return f"ttft_p95={level.ttft_s}s,tpot_p95={level.tpot_s}s"


def find_edge(server: BenchmarkServer, level: ServiceLevel, asked: argparse.Namespace, stage: str) -> Verdict:
    arrival = ArrivalConfig(rate=asked.start, duration_s=asked.seconds)
    config = SearchConfig(slo=limits(level)).with_arrival(arrival)
    try_level = trier(config, arrival, workload(asked, stage), MEASURED, Target(server.url, "m"))
    path = asked.folder / f"{stage}.json"
    settings = {"slo": asked.slo, "seconds": asked.seconds, "input": asked.input_len, "output": asked.output_len}
    trials = read_trials(path, settings)

    def attempt(rate: float) -> Trial:
        trials.append(try_level(rate, len(trials)))
        write_trials(path, settings, trials)
        return trials[-1]

    wanted = SearchSettings(asked.start, most=256.0, is_whole=False, most_trials=asked.trials, resolution=RESOLUTION)
    return search(attempt, wanted, list(trials))


def workload(asked: argparse.Namespace, stage: str) -> WorkloadConfig:
    seed = 1_000_000 * STAGES.index(stage)
    return WorkloadConfig(input_len=asked.input_len, output_len=asked.output_len, bench_seed=seed)


def run_beyond(server: BenchmarkServer, level: ServiceLevel, asked: argparse.Namespace, edge: float) -> dict[str, Any]:
    """Loads at parts of an edge. The first few seconds of each are not counted: the queue is empty then."""
    kept = parse_goodput(asked.slo)
    found: dict[str, Any] = {}
    for number, part in enumerate((PARTS[0], *PARTS)):  # the first: what steps cost is learned
        arrival = ArrivalConfig(rate=part * edge, duration_s=asked.seconds)
        config = workload(asked, "beyond")
        work = config.sessions()
        work = replace(work, seed=work.seed + number)
        records = MEASURED.run(Target(server.url, "m"), arrival.load(work, config), work).records
        found[str(part)] = share_of(records, kept, asked.seconds)
        print(f"  {part} of the edge: {found[str(part)]}", flush=True)
    return found


def share_of(records: Sequence[BenchRecord], kept: dict[str, float], seconds: float) -> dict[str, float]:
    warm_s = min(5.0, seconds / 4)
    counted = [record for record in records if record.sent_s > warm_s]
    refused = sum(record.status == REFUSED for record in counted)
    good = sum(meets(record, kept) for record in counted)
    return {
        "sent": len(counted),
        "refused": round(refused / len(counted), 3),
        "late": round((len(counted) - refused - good) / len(counted), 3),
        "goodput": round(good / (seconds - warm_s), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--slo", default="ttft=2s,tpot=80ms")
    parser.add_argument("--stage", choices=STAGES, action="append", help="all of them unless said")
    parser.add_argument("--folder", type=Path, default=Path("promises"), help="keeps what was found")
    parser.add_argument("--seconds", type=float, default=20.0, help="of one trial")
    parser.add_argument("--trials", type=int, default=14, help="to find each edge, those of earlier runs included")
    parser.add_argument("--start", type=float, default=4.0, help="the first rate")
    parser.add_argument("--input-len", default="50:150")
    parser.add_argument("--output-len", default="8:24")
    asked = parser.parse_args()
    level = read_service_level(asked.slo)
    if level.ttft_s is None or level.tpot_s is None:
        raise SystemExit("--slo takes both: ttft and tpot")
    asked.folder.mkdir(parents=True, exist_ok=True)
    summary = asked.folder / "found.json"
    found: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    flags = ("--max-running", "64", "--speculate", "off", "--slo")
    for stage in asked.stage or STAGES:
        promised = f"tpot={level.tpot_s}s" if stage == "edge" else asked.slo
        with BenchmarkServer(asked.model, *flags, promised) as server:
            if stage == "beyond":
                found[stage] = run_beyond(server, level, asked, found["edge"]["best"])
            else:
                verdict = find_edge(server, level, asked, stage)
                found[stage] = {"best": verdict.best, "likely": verdict.likely, "trials": len(verdict.trials)}
                print(f"{stage}: {found[stage]}", flush=True)
        summary.write_text(json.dumps(found))
    if all(stage in found for stage in STAGES):
        goodput = {part: one["goodput"] for part, one in found["beyond"].items()}
        found["edges_ratio"] = round(found["admission"]["best"] / found["edge"]["best"], 3)
        found["goodput_beyond"] = round(goodput[str(PARTS[-1])] / max(goodput.values()), 3)
    print(json.dumps({"benchmark": "promises", "slo": asked.slo, **found}))


if __name__ == "__main__":
    main()
