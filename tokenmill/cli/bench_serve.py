"""`tokenmill bench serve` and `report`: load on a server, and runs side by side."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from tokenmill.cli import load_flags
from tokenmill.cli.amounts import Amount, AmountOrZero, Count
from tokenmill.cli.checks import refuse_idle, require_folder
from tokenmill.cli.load_flags import WorkloadConfig, closed_load, settings_of
from tokenmill.cli.load_screen import show_run
from tokenmill.cli.tables import print_json_line, print_rich_table
from tokenmill.errors import InvalidConfig

if TYPE_CHECKING:
    from tokenmill.bench.load import ClosedLoop, LoadRun, OpenLoop
    from tokenmill.bench.workloads import Workload


@dataclass(frozen=True)
class ArrivalConfig:
    concurrency: Count | None = None
    """Closed loop: so many clients, each waits for its answer before it asks again."""
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
    """Send no more after so many seconds."""
    trace: Path | None = None
    """Replay recorded traffic: an Azure csv or Mooncake jsonl file."""
    time_scale: Amount = 1.0
    """Stretch the trace: 2 is half as fast."""
    length_scale: Amount = 1.0
    """Scale the trace's prompts and answers."""
    trace_s: Amount | None = None
    """Only the first so many recorded seconds."""
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
        from tokenmill.bench.arrivals import ArrivalProcess
        from tokenmill.bench.load import OpenLoop

        process = ArrivalProcess(rate, self.arrivals, self.burstiness, self.rate_end, self.duration_s)
        timed = zip(process.times(work.seed), work.sessions(), strict=False)
        return OpenLoop(islice(timed, self.count) if self.count else timed, self.duration_s)

    def _replay(self, path: Path, asked: WorkloadConfig) -> OpenLoop:
        from tokenmill.bench.load import OpenLoop
        from tokenmill.bench.traces import TraceScale, read_trace
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
        """Before anything is sent."""
        from tokenmill.arch.read import read_spec
        from tokenmill.bench.slo import parse_goodput
        from tokenmill.bench.utilisation import known_device

        parse_goodput(self.goodput)
        require_folder(self.output, "output")
        if (self.known_model is None) != (self.device is None):
            raise InvalidConfig("--known-model and --device go together", param="device")
        if self.known_model is not None and self.device is not None:
            known_device(self.device)
            read_spec(self.known_model)

    def figures(self, run: LoadRun) -> dict[str, Any]:
        from tokenmill.bench.slo import parse_goodput
        from tokenmill.bench.totals import totals
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
    workload: load_flags.WorkloadFlags = load_flags.WORKLOAD,
    target: load_flags.TargetFlags = load_flags.TARGET,
    wanted: ResultFlags = ResultConfig(),
    measurement: load_flags.RunFlags = load_flags.RUN,
) -> int:
    """Load on any server, open or closed loop; latencies and throughput as its clients see them."""
    from tokenmill.bench.report import ReportRun, html_report
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
    show_run(found, aim)
    print_json_line(found)
    return 0 if found["completed"] else 1


def report(*files: Path, html: Path | None = None) -> int:
    """Compare results of `bench serve --output`, side by side.

    Parameters
    ----------
    files
        Result files.
    html
        Write a page with plots laid over each other to this file.
    """
    from tokenmill.bench.report import ReportRun, comparison_rows, html_report, titles
    from tokenmill.bench.result import read_result

    if not files:
        raise InvalidConfig("name at least one result file")
    runs = [ReportRun(path.stem, *read_result(path)) for path in files]
    print_rich_table("Runs", titles(runs), comparison_rows(runs))
    if html is not None:
        html.write_text(html_report(runs), encoding="utf-8")
    print_json_line({"benchmark": "report", "runs": [{"name": run.name, **run.figures} for run in runs]})
    return 0
