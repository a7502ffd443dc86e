"""`tokenmill bench search`: the largest concurrency or arrival rate that a server holds within limits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from tokenmill.cli.bench_serve import (
    TargetConfig,
    TargetFlags,
    WorkloadConfig,
    WorkloadFlags,
    closed_load,
    live_progress,
    make_target,
    make_workload,
    open_load,
    settings_of,
)
from tokenmill.cli.tables import print_json_line, print_rich_table


def search(
    *,
    slo: str = "ttft_p95=1s,tpot_p95=100ms",
    over: Literal["concurrency", "rate"] = "concurrency",
    start: float = 1.0,
    most: float = 4096,
    repeats: int = 3,
    waves: int = 4,
    trial_s: float = 20.0,
    warmup: int = 2,
    max_lag_ms: float = 20.0,
    resume: Path | None = None,
    html: Path | None = None,
    target: TargetFlags = TargetConfig(),
    workload: WorkloadFlags = WorkloadConfig(),
) -> int:
    """The largest load a server holds within limits on latency, with how sure that is.

    Parameters
    ----------
    slo
        Limits: METRIC_STATISTIC=DURATION with ttft, tpot, itl, e2e and p50 to p99 or mean.
    over
        What is raised: concurrency (closed loop) or arrival rate (open loop).
    start
        First level tried.
    most
        Highest level tried.
    repeats
        Trials of each level next to the edge.
    waves
        Requests a trial sends per client (concurrency).
    trial_s
        Seconds that a trial sends requests (rate).
    warmup
        Requests before each trial.
    max_lag_ms
        Give up when the load generator lagged more than this (99th percentile).
    resume
        File that keeps the trials; a search that was broken off goes on from it.
    html
        Write the curve to this file.
    """
    from tokenmill.bench.search import SearchSettings, read_trials, write_trials
    from tokenmill.bench.search import search as find
    from tokenmill.bench.search_report import curve_rows, curve_titles, html_search, sentence
    from tokenmill.bench.slo import parse_limits

    limits = parse_limits(slo)
    aim, work = make_target(target), make_workload(workload)
    settings = settings_of(target, workload, slo=slo, over=over, waves=waves, trial_s=trial_s, model=aim.model)
    known = read_trials(resume, settings) if resume else []
    trials = list(known)

    def attempt(level: float) -> Any:
        if over == "concurrency":
            load = closed_load(work, int(level), max(8, int(level) * waves), None)
        else:
            load = open_load(work, level, "poisson", 1.0, None, trial_s, None)
        trial = try_once(aim, work, load, level, limits, warmup, max_lag_ms)
        trials.append(trial)
        if resume is not None:
            write_trials(resume, settings, trials)
        return trial

    verdict = find(attempt, SearchSettings(start, most, repeats, over == "concurrency"), known)
    what = "concurrency" if over == "concurrency" else "requests a second"
    print_rich_table(f"{aim.model} at {aim.url}: {slo}", curve_titles(verdict.trials), curve_rows(verdict.trials))
    print(sentence(verdict, what))
    if html is not None:
        html.write_text(html_search(verdict, what), encoding="utf-8")
    print_json_line(
        {"benchmark": "search", "over": over, "best": verdict.best, "first_failing": verdict.first_failing,
         "confidence": verdict.confidence, "settings": settings, "trials": [asdict(t) for t in verdict.trials]}
    )  # fmt: skip
    return 0 if verdict.best is not None else 1


def try_once(aim: Any, work: Any, load: Any, level: float, limits: Any, warmup: int, max_lag_ms: float) -> Any:
    from itertools import islice

    from tokenmill.bench.load import run_load
    from tokenmill.bench.search import judge
    from tokenmill.bench.totals import totals

    with live_progress() as progress:
        run = run_load(aim, load, warmup=islice(work.sessions(), warmup), progress=progress)
    assert run.lag is not None
    run.lag.refuse_beyond(max_lag_ms)
    found = totals(run.records)
    rates = {"output_tok_s": found["output_tok_s"], "requests_s": found["requests_s"]}
    trial = judge(level, run.records, limits, rates)
    print(f"  {level:g}: {'within the limits' if trial.passed else trial.reason}", flush=True)
    return trial
