"""`tokenmill bench search`: the largest concurrency or arrival rate that a server holds within limits."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from tokenmill.cli import load_flags
from tokenmill.cli.amounts import Amount, AmountOrZero, Count
from tokenmill.cli.bench_serve import ArrivalConfig
from tokenmill.cli.checks import refuse_idle, require_folder
from tokenmill.cli.exit_codes import INTERRUPTED
from tokenmill.cli.load_flags import RunConfig, WorkloadConfig, closed_load, settings_of
from tokenmill.cli.tables import print_json_line, print_rich_table

if TYPE_CHECKING:
    from tokenmill.bench.load import LoadRun, Target
    from tokenmill.bench.search import SearchSettings, Trial


@dataclass(frozen=True)
class SearchConfig:
    slo: str = "ttft_p95=1s,tpot_p95=100ms"
    """Limits: METRIC_STATISTIC=DURATION with ttft, tpot, itl, e2e and p50 to p99 or mean."""
    over: Literal["concurrency", "rate"] = "concurrency"
    """What is raised: concurrency (closed loop) or arrival rate (open loop)."""
    start: Amount = 1.0
    """First level tried."""
    most: Amount = 4096
    """Highest level tried."""
    confidence: float = 0.9
    """The search ends when it is that sure of the edge, give or take 5 %."""
    trials: Count = 120
    """It also ends after so many trials, and says how sure it is by then."""
    noisy_s: AmountOrZero = 300.0
    """Where trials contradict each other it lasts at least so many seconds: a machine that others share is slow or fast
    in phases, and an edge found within one of them is that phase's."""
    waves: Count = 4
    """Requests a trial sends per client (concurrency)."""
    trial_s: Amount = 20.0
    """Seconds that a trial sends requests (rate)."""

    @property
    def is_closed(self) -> bool:
        return self.over == "concurrency"

    @property
    def what(self) -> str:
        return "concurrency" if self.is_closed else "requests a second"

    def settings(self) -> SearchSettings:
        from tokenmill.bench.search import SearchSettings

        refuse_idle(
            self, {"waves": (self.is_closed, "--over concurrency"), "trial_s": (not self.is_closed, "--over rate")}
        )
        return SearchSettings(self.start, self.most, self.confidence, self.trials, self.is_closed, noisy_s=self.noisy_s)


SearchFlags = Annotated[SearchConfig, Parameter(name="*", group=Group.create_ordered("What is searched"))]


def search(
    *,
    asked: SearchFlags = SearchConfig(),
    workload: load_flags.WorkloadFlags = load_flags.WORKLOAD,
    target: load_flags.TargetFlags = load_flags.TARGET,
    measurement: load_flags.RunFlags = load_flags.RUN,
    resume: Path | None = None,
) -> int:
    """The largest load a server holds within limits on latency, with how sure that is.

    Ctrl-C or SIGTERM ends it early, with what is known by then.

    Parameters
    ----------
    resume
        File that keeps the trials; a search that was broken off goes on from it.
    """
    from tokenmill.bench.search import read_trials, write_trials
    from tokenmill.bench.search import search as find
    from tokenmill.bench.search_report import curve_rows, curve_titles, html_search, sentence

    edge = asked.settings()
    require_folder(resume, "resume")
    aim = target.target()
    settings = settings_of(target, workload, slo=asked.slo, over=asked.over, waves=asked.waves, trial_s=asked.trial_s,
                           model=aim.model)  # fmt: skip
    known = read_trials(resume, settings) if resume else []
    trials, try_level = list(known), trier(asked, workload, measurement, aim)

    def attempt(level: float) -> Trial:
        trials.append(try_level(level))
        if resume is not None:
            write_trials(resume, settings, trials)
        return trials[-1]

    with ended_by(signal.SIGTERM):
        verdict = find(attempt, edge, known)
    print_rich_table(f"{aim.model} at {aim.url}: {asked.slo}", curve_titles(verdict.trials), curve_rows(verdict.trials))
    print(sentence(verdict, asked.what))
    if measurement.html is not None:
        measurement.write_page(html_search(verdict, asked.what))
    print_json_line(
        {"benchmark": "search", "over": asked.over, "best": verdict.best, "first_failing": verdict.first_failing,
         "confidence": verdict.confidence, "likely": verdict.likely, "was_cut_short": verdict.was_cut_short,
         "settings": settings,
         "trials": [asdict(t) for t in verdict.trials]}
    )  # fmt: skip
    if verdict.was_cut_short:
        return INTERRUPTED
    return 0 if verdict.best is not None else 1


@contextmanager
def ended_by(number: signal.Signals) -> Iterator[None]:
    """Meanwhile this signal ends things as Ctrl-C does: hours of trials are worth their verdict."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def trier(
    asked: SearchConfig, workload: WorkloadConfig, measurement: RunConfig, aim: Target
) -> Callable[[float], Trial]:
    """What tries one level."""
    from tokenmill.bench.slo import parse_limits

    limits, work = parse_limits(asked.slo), workload.sessions()

    def run_at(level: float) -> LoadRun:
        if asked.is_closed:
            return measurement.run(aim, closed_load(work, int(level), max(8, int(level) * asked.waves), None), work)
        return measurement.run(aim, ArrivalConfig(rate=level, duration_s=asked.trial_s).load(work, workload), work)

    def try_level(level: float) -> Trial:
        from tokenmill.bench.search import judge
        from tokenmill.bench.totals import totals

        run = run_at(level)
        found = totals(run.records)
        rates = {"output_tok_s": found["output_tok_s"], "requests_s": found["requests_s"]}
        trial = judge(level, run.records, limits, {**rates, "ended_s": time.time()})
        print(f"  {level:g}: {'within the limits' if trial.passed else trial.reason}", flush=True)
        return trial

    return try_level
