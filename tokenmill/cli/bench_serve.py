"""`tokenmill bench serve`, `search` and `report`: load a server, find its largest load within limits, compare runs."""

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
    """Closed loop: number of clients, each of which waits for its answer before sending its next request."""
    rate: Amount | None = None
    """Open loop: requests per second, whether or not the server keeps up."""
    arrivals: Literal["poisson", "gamma", "constant", "ramp"] = "poisson"
    """Distribution of open-loop arrivals."""
    burstiness: Amount = 0.5
    """Shape of gamma arrivals: below 1 is bursty, 1 is Poisson."""
    rate_end: Amount | None = None
    """Arrival rate at the end of a ramp."""
    num_requests: Count | None = None
    """Requests to send, or conversations (multi-turn); 100 by default, unless there is a duration or a trace."""
    duration_s: Amount | None = None
    """Stop sending requests after this many seconds."""
    trace: Path | None = None
    """Replay recorded traffic: an Azure CSV, a Mooncake JSONL file, or a server's request log."""
    time_scale: Amount = 1.0
    """Factor on the trace's times: 2 replays it at half speed."""
    length_scale: Amount = 1.0
    """Factor on the lengths of the trace's prompts and answers."""
    trace_s: Amount | None = None
    """Replay only this many seconds from the start of the trace."""
    trace_share: Amount = 1.0
    """Replay only this share of the requests, chosen at random."""

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
    """Latency limits for goodput: ttft=1s,tpot=100ms."""
    usd_per_hour: AmountOrZero | None = None
    """Price of the server per hour, for cost per token."""
    known_model: Path | None = None
    """config.json or GGUF file of the served model, to report MFU and MBU."""
    device: str | None = None
    """Device of the server, from `plan --devices`, to report MFU and MBU."""
    output: Path | None = None
    """Write every request to this JSON file, for `bench report` and `plan --calibrate`."""

    def check(self) -> None:
        """Refuse invalid settings before any request is sent."""
        from tokenmill.arch.read import read_spec
        from tokenmill.bench.totals import parse_goodput
        from tokenmill.bench.utilisation import known_device

        parse_goodput(self.goodput)
        require_folder(self.output, "output")
        if (self.known_model is None) != (self.device is None):
            raise InvalidConfig("--known-model and --device must be given together", param="device")
        if self.known_model is not None and self.device is not None:
            known_device(self.device)
            read_spec(self.known_model)

    def check_search(self) -> None:
        """Refuse flags without effect on a search, whose limits are set by --slo."""
        refuse_idle(self, {"goodput": (False, "`bench serve`; a search has --slo"),
                           "known_model": (False, "`bench serve`"), "device": (False, "`bench serve`")})  # fmt: skip
        require_folder(self.output, "output")

    def price_at(self, verdict: Verdict) -> float | None:
        """Return dollars per million output tokens at the largest passing load; None without a price."""
        speeds = [trial.output_tok_s for trial in verdict.trials if trial.passed and trial.output_tok_s > 0]
        return self.usd_per_hour / 3600 / max(speeds) * 1e6 if self.usd_per_hour and speeds else None

    def figures(self, run: LoadRun) -> dict[str, Any]:
        from tokenmill.bench.totals import parse_goodput, totals
        from tokenmill.bench.utilisation import utilisation

        figures = totals(run.records, goodput=parse_goodput(self.goodput), usd_per_hour=self.usd_per_hour)
        if self.known_model is None or self.device is None:
            return figures
        return figures | utilisation(run.records, self.known_model, self.device)


ArrivalFlags = Annotated[ArrivalConfig, Parameter(name="*", group=Group.create_ordered("Arrival of requests"))]
ResultFlags = Annotated[ResultConfig, Parameter(name="*", group=Group.create_ordered("Report"))]


def serve(
    *,
    arrival: ArrivalFlags = ArrivalConfig(),
    workload: bench_load.WorkloadFlags = bench_load.WORKLOAD,
    target: bench_load.TargetFlags = bench_load.TARGET,
    wanted: ResultFlags = ResultConfig(),
    measurement: bench_load.RunFlags = bench_load.RUN,
) -> int:
    """Benchmark any server with open- or closed-loop load: latencies and throughput as seen by clients."""
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
    """Compare results of `bench serve --output` side by side.

    Parameters
    ----------
    files
        Result files.
    html
        Write a page with overlaid charts to this file.
    json
        Print one JSON object instead of tables; into a pipe it is always printed as the last line.
    """
    from tokenmill.bench.pages import html_report
    from tokenmill.bench.report import ReportRun, different_settings, latency_matrix, matrix_rows, throughput_matrix
    from tokenmill.bench.result import read_result

    if not files:
        raise InvalidConfig("at least one result file is needed")
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
    """Latency limits, METRIC_STATISTIC=DURATION: ttft, tpot, itl or e2e, with p50 to p99 or mean."""
    over: Literal["concurrency", "rate"] | None = None
    """Quantity to search: concurrency (closed loop) or rate (open loop, the default with --rate)."""
    start: Amount | None = None
    """First load to try; by default the value of --concurrency or --rate, or 1."""
    most: Amount = 4096
    """Highest load to try."""
    confidence: float = 0.9
    """Stop when the highest passing load is known to within 5 % with this confidence."""
    trials: Count = 120
    """Stop after this many trials in any case, and report the confidence reached."""
    noisy_s: AmountOrZero = 300.0
    """Search for at least this many seconds if trials contradict each other: a shared machine may be slow for minutes,
    and a shorter search would only measure that period."""
    waves: Count = 4
    """Requests per client in a trial (--over concurrency), unless --num-requests sets the total."""
    trial_s: Amount = 20.0
    """Duration of a trial in seconds (--over rate); the same as --duration-s."""

    def with_arrival(self, arrival: ArrivalConfig) -> SearchConfig:
        """Return the settings with those that follow from `bench serve`'s flags: the first load and the quantity."""
        if arrival.trace is not None:
            raise InvalidConfig("a search varies the load, which a --trace fixes; use `bench serve`", param="trace")
        if arrival.arrivals == "ramp":
            raise InvalidConfig(
                "a search varies the rate between trials; --arrivals ramp is not possible", param="arrivals"
            )
        over = self.over or ("concurrency" if arrival.rate is None else "rate")
        wrong = "rate" if over == "concurrency" else "concurrency"
        if getattr(arrival, wrong) is not None:
            raise InvalidConfig(f"--{wrong} does not apply to a search --over {over}", param=wrong)
        start = self.start or getattr(arrival, over) or 1.0
        return replace(self, over=over, start=start, trial_s=arrival.duration_s or self.trial_s)

    @property
    def is_closed(self) -> bool:
        return self.over != "rate"

    @property
    def what(self) -> str:
        return "concurrency" if self.is_closed else "requests per second"

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


SearchFlags = Annotated[SearchConfig, Parameter(name="*", group=Group.create_ordered("Search"))]


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
    """Find the largest load at which a server meets latency limits, with a confidence.

    The flags of `bench serve` that set a load set the first one to try. Ctrl-C or SIGTERM ends the search with the
    estimate so far.

    Parameters
    ----------
    resume
        File that records the trials, from which an interrupted search is resumed.
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
    """Make a signal end the search like Ctrl-C, so that hours of trials still give a result."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def trier(
    asked: SearchConfig, arrival: ArrivalConfig, workload: WorkloadConfig, measurement: RunConfig, aim: Target
) -> Callable[[float, int], Trial]:
    """Return a function that runs one trial, given its load and number. Every trial has new prompts, because those of
    earlier trials are in the server's prefix cache."""
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
