"""`tokenmill bench serve`, `search` and `report`: load on a server, the most load within limits, runs side by side."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from tokenmill.cli import bench_load
from tokenmill.cli.bench_load import RunConfig, WorkloadConfig, closed_load, settings_of, show_run
from tokenmill.cli.exit_codes import INTERRUPTED
from tokenmill.cli.flags import Amount, AmountOrZero, Count, Switch, refuse_idle, require_folder, require_page
from tokenmill.cli.output import finite, print_result, print_rich_table
from tokenmill.errors import InvalidConfig

if TYPE_CHECKING:
    from tokenmill.bench.load import ClosedLoop, LoadRun, OpenLoop, Target
    from tokenmill.bench.search import SearchSettings, Trial, Verdict
    from tokenmill.bench.workloads import Workload


@dataclass(frozen=True)
class ArrivalConfig:
    concurrency: Count | None = None
    """Closed loop: number of clients, each of which waits for its answer before it sends the next request."""
    rate: Amount | None = None
    """Open loop: requests a second, whether the server keeps up or not."""
    arrivals: Literal["poisson", "gamma", "constant", "ramp"] = "poisson"
    """How open-loop requests are spread."""
    burstiness: Amount = 0.5
    """Shape of gamma arrivals: below 1 in clusters, 1 as poisson."""
    rate_end: Amount | None = None
    """Rate at the end of a ramp."""
    num_requests: Count | None = None
    """Requests to send, or conversations (multi-turn); 100 by default, unless there is a duration or a trace."""
    duration_s: Amount | None = None
    """Stop sending requests after this many seconds."""
    trace: Path | None = None
    """Replay recorded traffic: an Azure csv, a Mooncake jsonl file, or a server's request log."""
    time_scale: Amount = 1.0
    """Stretch the trace: 2 is half as fast."""
    length_scale: Amount = 1.0
    """Scale the trace's prompts and answers."""
    trace_s: Amount | None = None
    """Replay only this many seconds from the start of the trace."""
    trace_share: Amount = 1.0
    """Keep this share of the recorded requests, drawn at random: for machines smaller than the recorded ones."""

    @property
    def count(self) -> int | None:
        is_bounded = self.num_requests is not None or self.duration_s is not None or self.trace is not None
        return self.num_requests if is_bounded else 100

    def check(self) -> None:
        """Refuse flags that exclude each other and flags that would be ignored."""
        given = [flag for flag in ("concurrency", "rate", "trace") if getattr(self, flag) is not None]
        if len(given) > 1:
            raise InvalidConfig(f"--{given[0]} and --{given[1]} exclude each other", param=given[1])
        of_a_trace = (self.trace is not None, "--trace")
        needs = dict.fromkeys(("time_scale", "length_scale", "trace_s", "trace_share"), of_a_trace)
        needs["arrivals"] = (self.rate is not None, "--rate")
        needs["burstiness"] = (self.arrivals == "gamma", "--arrivals gamma")
        needs["rate_end"] = (self.arrivals == "ramp", "--arrivals ramp")
        refuse_idle(self, needs)

    def load(self, work: Workload, asked: WorkloadConfig) -> ClosedLoop | OpenLoop:
        if self.trace is not None:
            return self._replay(self.trace, asked)
        if self.rate is not None:
            return self._open(work, self.rate)
        return closed_load(work, self.concurrency or 1, self.count, self.duration_s)

    def _open(self, work: Workload, rate: float) -> OpenLoop:
        from tokenmill.bench.load import OpenLoop
        from tokenmill.bench.traffic import ArrivalProcess

        process = ArrivalProcess(rate, self.arrivals, self.burstiness, self.rate_end, self.duration_s)
        timed = zip(process.times(work.seed), work.sessions(), strict=False)
        return OpenLoop(islice(timed, self.count) if self.count else timed, self.duration_s)

    def _replay(self, path: Path, asked: WorkloadConfig) -> OpenLoop:
        from tokenmill.bench.load import OpenLoop
        from tokenmill.bench.traffic import TraceScale, read_trace
        from tokenmill.bench.workloads import trace_session

        first_s = float("inf") if self.trace_s is None else self.trace_s
        scale = TraceScale(
            self.time_scale, self.length_scale, first_s, asked.max_input, asked.max_output, self.trace_share,
            asked.bench_seed,
        )  # fmt: skip
        rows = read_trace(path, scale)[: self.count]
        timed = ((row.at_s, trace_session(row, n, asked.bench_seed, self.length_scale)) for n, row in enumerate(rows))
        return OpenLoop(timed, self.duration_s)


@dataclass(frozen=True)
class ResultConfig:
    goodput: str = ""
    """Limits that a good request keeps: ttft=1s,tpot=100ms."""
    usd_per_hour: AmountOrZero | None = None
    """Price of the server, for cost per token."""
    known_model: Path | None = None
    """config.json or GGUF file of the served model: MFU and MBU are reported too."""
    device: str | None = None
    """Device that serves it, as `plan --devices` lists them; needed for MFU and MBU."""
    output: Path | None = None
    """Write every request to this JSON file; `bench report` compares them, `plan --calibrate` learns from them."""

    def check(self) -> None:
        """Refuse wrong settings before anything is sent."""
        from tokenmill.arch.read import read_spec
        from tokenmill.bench.totals import parse_goodput
        from tokenmill.bench.utilisation import known_device

        parse_goodput(self.goodput)
        require_folder(self.output, "output")
        if (self.known_model is None) != (self.device is None):
            raise InvalidConfig("--known-model and --device go together", param="device")
        if self.known_model is not None and self.device is not None:
            known_device(self.device)
            read_spec(self.known_model)

    def check_search(self) -> None:
        """Refuse what says nothing about a search: its limits are those of --slo."""
        refuse_idle(self, {"goodput": (False, "`bench serve`; a search has --slo"),
                           "known_model": (False, "`bench serve`"), "device": (False, "`bench serve`")})  # fmt: skip
        require_folder(self.output, "output")

    def price_at(self, verdict: Verdict) -> float | None:
        """Dollars per million output tokens at the largest load that held; None where there is no price."""
        speeds = [trial.output_tok_s for trial in verdict.trials if trial.passed and trial.output_tok_s > 0]
        return self.usd_per_hour / 3600 / max(speeds) * 1e6 if self.usd_per_hour and speeds else None

    def figures(self, run: LoadRun) -> dict[str, Any]:
        from tokenmill.bench.totals import parse_goodput, totals
        from tokenmill.bench.utilisation import utilisation

        figures = totals(run.records, goodput=parse_goodput(self.goodput), usd_per_hour=self.usd_per_hour)
        if self.known_model is None or self.device is None:
            return figures
        return figures | utilisation(run.records, self.known_model, self.device)


ArrivalFlags = Annotated[ArrivalConfig, Parameter(name="*", group=Group.create_ordered("When it is asked"))]
ResultFlags = Annotated[ResultConfig, Parameter(name="*", group=Group.create_ordered("What is reported"))]


def serve(
    *,
    arrival: ArrivalFlags = ArrivalConfig(),
    workload: bench_load.WorkloadFlags = bench_load.WORKLOAD,
    target: bench_load.TargetFlags = bench_load.TARGET,
    wanted: ResultFlags = ResultConfig(),
    measurement: bench_load.RunFlags = bench_load.RUN,
) -> int:
    """Put load on any server, open or closed loop; measure latencies and throughput as its clients see them."""
    from tokenmill.bench.pages import html_report
    from tokenmill.bench.report import ReportRun
    from tokenmill.bench.result import result, write_result

    wanted.check()
    arrival.check()
    work, aim = workload.sessions(has_trace=arrival.trace is not None), target.target()
    run = measurement.run(aim, arrival.load(work, workload), work)
    settings = settings_of(
        target, workload, arrival, warmup=measurement.warmup, model=aim.model, num_requests=arrival.count
    )
    found = result(run, settings, wanted.figures(run))
    if wanted.output is not None:
        write_result(wanted.output, found, run)
    if measurement.html is not None:
        measurement.write_page(html_report([ReportRun(f"{aim.model} at {aim.url}", found, run.records)]))
    if not measurement.json:
        show_run(found, aim)
    print_result(found, as_json=measurement.json)
    return 0 if found["completed"] else 1


def report(*files: Path, html: Path | None = None, json: Switch = False) -> int:
    """Compare results of `bench serve --output`, side by side.

    Parameters
    ----------
    files
        Result files.
    html
        Write a page with plots laid over each other to this file.
    json
        One JSON object instead of tables; into a pipe it comes as the last line in any case.
    """
    from tokenmill.bench.pages import html_report
    from tokenmill.bench.report import ReportRun, different_settings, latency_matrix, matrix_rows, throughput_matrix
    from tokenmill.bench.result import read_result

    if not files:
        raise InvalidConfig("name at least one result file")
    require_page(html)
    runs = [ReportRun(path.stem, *read_result(path)) for path in files]
    tables = [] if json else [("Runs", throughput_matrix(runs)), ("Latency", latency_matrix(runs))]
    if tables and len(runs) > 1 and (differences := different_settings(runs))[1]:
        print_rich_table("What differs", *differences)
    for title, (columns, groups) in tables:
        print_rich_table(title, columns, matrix_rows(groups))
    if html is not None:
        html.write_text(html_report(runs), encoding="utf-8")
    figures = [{"name": run.name, **run.figures} for run in runs]
    print_result({"benchmark": "report", "runs": figures}, as_json=json)
    return 0


# ── search ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SearchConfig:
    slo: str = "ttft_p95=1s,tpot_p95=100ms"
    """Limits: METRIC_STATISTIC=DURATION with ttft, tpot, itl, e2e and p50 to p99 or mean."""
    over: Literal["concurrency", "rate"] | None = None
    """What is raised: concurrency (closed loop) or arrival rate (open loop, where --rate is given)."""
    start: Amount | None = None
    """First level tried; 1, or what --concurrency or --rate says."""
    most: Amount = 4096
    """Highest level tried."""
    confidence: float = 0.9
    """End the search when the highest passing level is known within 5 % with this confidence."""
    trials: Count = 120
    """End the search after this many trials in any case, and report the confidence reached."""
    noisy_s: AmountOrZero = 300.0
    """Search for at least this many seconds where trials contradict each other: a shared machine is slow and fast in
    phases, and a result found within one phase would only describe that phase."""
    waves: Count = 4
    """Requests per client in a trial (--over concurrency); --num-requests says how many in all."""
    trial_s: Amount = 20.0
    """Seconds in which a trial sends requests (--over rate); --duration-s is the same."""

    def with_arrival(self, arrival: ArrivalConfig) -> SearchConfig:
        """The settings with what `bench serve`'s flags say: where to begin, and what is raised."""
        if arrival.trace is not None:
            raise InvalidConfig("--trace has loads of its own: `bench serve` replays it", param="trace")
        if arrival.arrivals == "ramp":
            raise InvalidConfig("a search raises the rate itself, trial by trial: no --arrivals ramp", param="arrivals")
        over = self.over or ("concurrency" if arrival.rate is None else "rate")
        wrong = "rate" if over == "concurrency" else "concurrency"
        if getattr(arrival, wrong) is not None:
            raise InvalidConfig(f"--{wrong} has nothing to do in a search --over {over}", param=wrong)
        start = self.start or getattr(arrival, over) or 1.0
        return replace(self, over=over, start=start, trial_s=arrival.duration_s or self.trial_s)

    @property
    def is_closed(self) -> bool:
        return self.over != "rate"

    @property
    def what(self) -> str:
        return "concurrency" if self.is_closed else "requests a second"

    def settings(self, arrival: ArrivalConfig) -> SearchSettings:
        from tokenmill.bench.search import SearchSettings

        of_rates, is_counted = (not self.is_closed, "--over rate"), arrival.num_requests is not None
        refuse_idle(
            self,
            {"waves": (self.is_closed and not is_counted, "--over concurrency without --num-requests"),
             "trial_s": of_rates},
        )  # fmt: skip
        refuse_idle(arrival, dict.fromkeys(("duration_s", "arrivals", "burstiness"), of_rates))
        start = self.start or 1.0
        return SearchSettings(start, self.most, self.confidence, self.trials, self.is_closed, noisy_s=self.noisy_s)


SearchFlags = Annotated[SearchConfig, Parameter(name="*", group=Group.create_ordered("What is searched"))]


def search(
    *,
    asked: SearchFlags = SearchConfig(),
    arrival: ArrivalFlags = ArrivalConfig(),
    workload: bench_load.WorkloadFlags = bench_load.WORKLOAD,
    target: bench_load.TargetFlags = bench_load.TARGET,
    wanted: ResultFlags = ResultConfig(),
    measurement: bench_load.RunFlags = bench_load.RUN,
    resume: Path | None = None,
) -> int:
    """Find the largest load that a server holds within limits on latency, with a confidence.

    It takes `bench serve`'s flags: those about load say where it begins. Ctrl-C or SIGTERM ends it early, with
    what is known by then.

    Parameters
    ----------
    resume
        File that keeps the trials; a search that was broken off goes on from it.
    """
    from tokenmill.bench.pages import html_search
    from tokenmill.bench.report import curve_rows, curve_titles, sentence
    from tokenmill.bench.result import without_key
    from tokenmill.bench.search import read_trials, write_trials
    from tokenmill.bench.search import search as find

    arrival.check()
    asked = asked.with_arrival(arrival)
    edge = asked.settings(arrival)
    require_folder(resume, "resume")
    wanted.check_search()
    aim = target.target()
    settings = settings_of(target, workload, slo=asked.slo, over=asked.over, waves=asked.waves, trial_s=asked.trial_s,
                           num_requests=arrival.num_requests, model=aim.model)  # fmt: skip
    known = read_trials(resume, settings) if resume else []
    trials, try_level = list(known), trier(asked, arrival, workload, measurement, aim)

    def attempt(level: float) -> Trial:
        trials.append(try_level(level, len(trials)))
        if resume is not None:
            write_trials(resume, settings, trials)
        return trials[-1]

    with ended_by(signal.SIGTERM):
        verdict = find(attempt, edge, known)
    if not measurement.json:
        title = f"{aim.model} at {aim.url}: {asked.slo}"
        print_rich_table(title, curve_titles(verdict.trials), curve_rows(verdict.trials))
        print(sentence(verdict, asked.what))
    if measurement.html is not None:
        measurement.write_page(html_search(verdict, asked.what, settings, without_key(sys.argv[1:])))
    found = {
        "benchmark": "search", "over": asked.over, "best": verdict.best, "first_failing": verdict.first_failing,
        "confidence": verdict.confidence, "likely": verdict.likely, "was_cut_short": verdict.was_cut_short,
        "usd_per_million_output": wanted.price_at(verdict), "settings": settings,
        "trials": [asdict(t) for t in verdict.trials],
    }  # fmt: skip
    if wanted.output is not None:
        wanted.output.write_text(dumps(finite(found)), encoding="utf-8")
    print_result(found, as_json=measurement.json)
    if verdict.was_cut_short:
        return INTERRUPTED
    return 0 if verdict.best is not None else 1


@contextmanager
def ended_by(number: signal.Signals) -> Iterator[None]:
    """Inside, this signal ends the search as Ctrl-C does: hours of trials still get their verdict."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def trier(
    asked: SearchConfig, arrival: ArrivalConfig, workload: WorkloadConfig, measurement: RunConfig, aim: Target
) -> Callable[[float, int], Trial]:
    """The function that runs one trial, at a level of load and with the number of trials before it. Each has prompts of
    its own: those of an earlier one would be in the server's prefix cache."""
    from tokenmill.bench.totals import parse_limits

    limits, first = parse_limits(asked.slo), workload.sessions()

    def run_at(level: float, number: int) -> LoadRun:
        work = replace(first, seed=first.seed + number)
        if asked.is_closed:
            count = arrival.num_requests or max(8, int(level) * asked.waves)
            return measurement.run(aim, closed_load(work, int(level), max(count, int(level)), None), work)
        opened = replace(arrival, rate=level, duration_s=asked.trial_s)
        return measurement.run(aim, opened.load(work, workload), work)

    def try_level(level: float, number: int) -> Trial:
        from tokenmill.bench.search import judge
        from tokenmill.bench.totals import totals

        run = run_at(level, number)
        found = totals(run.records)
        rates = {"output_tok_s": found["output_tok_s"], "requests_s": found["requests_s"]}
        trial = judge(level, run.records, limits, {**rates, "ended_s": time.time()})
        out = sys.stderr if measurement.json else sys.stdout
        print(f"  {level:g}: {'within the limits' if trial.passed else trial.reason}", file=out, flush=True)
        return trial

    return try_level
