"""`tokenmill bench serve` and `report`: load on a server, and runs side by side."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tokenmill.cli.tables import number, print_json_line, print_rich_table
from tokenmill.errors import InvalidConfig, RequestFailed

LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("end to end", "e2e"))


@dataclass(frozen=True)
class TargetConfig:
    url: str = "http://127.0.0.1:8000"
    """Where the server is."""
    model: str | None = None
    """Name of the model to ask for; the first the server lists by default."""
    dialect: str = "openai-chat"
    """openai-chat, openai-completions, anthropic, ollama or tgi."""
    api_key: str | None = None
    """Key sent as the dialect wants it."""
    timeout_s: float = 600.0
    """A request that takes longer has failed."""


@dataclass(frozen=True)
class WorkloadConfig:
    workload: str = "random"
    """random, text, lengths (a csv), shared-prefix, multi-turn or schema."""
    input_len: str = "128"
    """Prompt tokens: a number or LOW:HIGH."""
    output_len: str = "64"
    """Answer tokens: a number or LOW:HIGH."""
    prefix_len: int = 256
    """Tokens of each shared prefix."""
    num_prefixes: int = 4
    """Different shared prefixes."""
    turns: int = 4
    """Turns of a conversation (multi-turn)."""
    file: Path | None = None
    """Text or csv of lengths for the workload."""
    schema: Path | None = None
    """JSON schema that answers must follow (schema)."""
    max_input: int | None = None
    """Cut longer prompts of a csv or trace."""
    max_output: int | None = None
    """Cut longer answers of a csv or trace."""
    bench_seed: int = 0
    """Seed of prompts, lengths and arrivals."""


TargetFlags = Annotated[TargetConfig, Parameter(name="*", group="Server under test")]
WorkloadFlags = Annotated[WorkloadConfig, Parameter(name="*", group="What is asked")]


def serve(
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    arrivals: Literal["poisson", "gamma", "constant", "ramp"] = "poisson",
    burstiness: float = 0.5,
    rate_end: float | None = None,
    trace: Path | None = None,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    trace_s: float | None = None,
    num_requests: int | None = None,
    duration_s: float | None = None,
    warmup: int = 2,
    goodput: str = "",
    usd_per_hour: float | None = None,
    known_model: Path | None = None,
    device: str | None = None,
    max_lag_ms: float = 20.0,
    output: Path | None = None,
    html: Path | None = None,
    target: TargetFlags = TargetConfig(),
    workload: WorkloadFlags = WorkloadConfig(),
) -> int:
    """Load on any server, open or closed loop; latencies and throughput as its clients see them.

    Parameters
    ----------
    concurrency
        Closed loop: so many clients, each waits for its answer before it asks again.
    rate
        Open loop: requests a second, whether the server keeps up or not.
    arrivals
        How open-loop requests are spread.
    burstiness
        Shape of gamma arrivals: below 1 in clusters, 1 as poisson.
    rate_end
        Rate at the end of a ramp.
    trace
        Replay recorded traffic: an Azure csv or Mooncake jsonl file.
    time_scale
        Stretch the trace: 2 is half as fast.
    length_scale
        Scale the trace's prompts and answers.
    trace_s
        Only the first so many recorded seconds.
    num_requests
        Requests to send (default 100 without a duration or trace).
    duration_s
        Send no more after so many seconds.
    warmup
        Requests before the measurement.
    goodput
        Limits that a good request keeps: ttft=1s,tpot=100ms.
    usd_per_hour
        Price of the server, for cost per token.
    known_model
        config.json or GGUF file of the served model: MFU and MBU are reported too.
    device
        Device that serves it, as `plan --devices` lists them; needed for MFU and MBU.
    max_lag_ms
        Refuse to report when the load generator lagged more than this (99th percentile).
    output
        Write every request to this JSON file.
    html
        Write a report with plots to this file.
    """
    from itertools import islice

    from tokenmill.bench.load import run_load
    from tokenmill.bench.report import ReportRun, html_report
    from tokenmill.bench.result import result, write_result
    from tokenmill.bench.slo import parse_goodput
    from tokenmill.bench.totals import totals
    from tokenmill.bench.utilisation import utilisation

    limits = parse_goodput(goodput)
    if (known_model is None) != (device is None):
        raise InvalidConfig("--known-model and --device go together", param="device")
    work = make_workload(workload)
    aim = make_target(target)
    count = num_requests if num_requests is not None or duration_s is not None or trace is not None else 100
    if trace is not None:
        load: Any = trace_load(trace, workload, time_scale, length_scale, trace_s, count, duration_s)
    elif rate is not None:
        load = open_load(work, rate, arrivals, burstiness, rate_end, duration_s, count)
    else:
        load = closed_load(work, concurrency or 1, count, duration_s)
    with live_progress() as progress:
        run = run_load(aim, load, warmup=islice(work.sessions(), warmup), progress=progress)
    assert run.lag is not None
    run.lag.refuse_beyond(max_lag_ms)
    settings = settings_of(target, workload, concurrency=concurrency, rate=rate, arrivals=arrivals, trace=trace,
                           burstiness=burstiness, time_scale=time_scale, length_scale=length_scale, trace_s=trace_s,
                           num_requests=count, duration_s=duration_s, warmup=warmup, model=aim.model)  # fmt: skip
    figures = totals(run.records, goodput=limits, usd_per_hour=usd_per_hour)
    if known_model is not None and device is not None:
        figures |= utilisation(run.records, known_model, device)
    found = result(run, settings, figures)
    if output is not None:
        write_result(output, found, run)
    if html is not None:
        html.write_text(html_report([ReportRun(f"{aim.model} at {aim.url}", found, run.records)]), encoding="utf-8")
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


# ── from flags to a load ───────────────────────────────────────────────────────────────────────────────


def make_target(config: TargetConfig) -> Any:
    from tokenmill.bench.load import Target

    model = config.model or first_model(config)
    return Target(config.url, model, config.dialect, config.api_key, config.timeout_s)


def first_model(config: TargetConfig) -> str:
    base = config.url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{base}/v1/models", headers=headers), timeout=10) as reply:
            return str(json.load(reply)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as problem:
        raise RequestFailed(f"{base} does not list its models: {problem}", hint="name one with --model") from None


def make_workload(config: WorkloadConfig) -> Any:
    from tokenmill.bench.lengths import Lengths
    from tokenmill.bench.workloads import Workload

    schema = json.loads(config.schema.read_text(encoding="utf-8")) if config.schema else None
    work = Workload(
        kind=config.workload,
        input_len=Lengths.parse(config.input_len, "input-len"),
        output_len=Lengths.parse(config.output_len, "output-len"),
        prefix_len=config.prefix_len,
        num_prefixes=config.num_prefixes,
        turns=config.turns,
        file=config.file,
        schema=schema,
        max_input=config.max_input,
        max_output=config.max_output,
        seed=config.bench_seed,
    )
    next(iter(work.sessions()))  # a wrong kind or file is refused before anything is sent
    return work


def closed_load(work: Any, concurrency: int, num_requests: int | None, duration_s: float | None) -> Any:
    from tokenmill.bench.load import ClosedLoop

    if concurrency < 1:
        raise InvalidConfig("--concurrency must be at least 1", param="concurrency")
    return ClosedLoop(concurrency, work.sessions(), num_requests, duration_s)


def open_load(
    work: Any,
    rate: float,
    process: Any,
    burstiness: float,
    rate_end: float | None,
    duration_s: float | None,
    num_requests: int | None,
) -> Any:
    from itertools import islice

    from tokenmill.bench.arrivals import Arrivals
    from tokenmill.bench.load import OpenLoop

    times = Arrivals(rate, process, burstiness, rate_end, duration_s).times(work.seed)
    timed = zip(times, work.sessions(), strict=False)
    return OpenLoop(islice(timed, num_requests) if num_requests else timed, duration_s)


def trace_load(
    path: Path,
    config: WorkloadConfig,
    time_scale: float,
    length_scale: float,
    trace_s: float | None,
    num_requests: int | None,
    duration_s: float | None,
) -> Any:
    from tokenmill.bench.load import OpenLoop
    from tokenmill.bench.traces import TraceScale, read_trace
    from tokenmill.bench.workloads import trace_session

    first_s = float("inf") if trace_s is None else trace_s
    scale = TraceScale(time_scale, length_scale, first_s, config.max_input, config.max_output)
    rows = read_trace(path, scale)[:num_requests]
    timed = ((row.at_s, trace_session(row, n, config.bench_seed, length_scale)) for n, row in enumerate(rows))
    return OpenLoop(timed, duration_s)


def settings_of(target: TargetConfig, workload: WorkloadConfig, **more: Any) -> dict[str, Any]:
    """Everything needed to repeat the run; never the key."""
    known = {**asdict(target), **asdict(workload), **more}
    known.pop("api_key")
    return {key: str(value) if isinstance(value, Path) else value for key, value in known.items() if value is not None}


# ── on the screen ──────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def live_progress() -> Iterator[Callable[[Any], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:

        def show(run: Any) -> None:
            failed = sum(record.error is not None for record in run.records)
            pieces = sum(len(record.times_s) for record in run.records[-2000:])
            line = f"{run.now_s:6.1f} s   {run.in_flight} running   {run.done} done   {failed} failed   {pieces} pieces"
            live.update(Text(line))

        yield show


def show_run(found: dict[str, Any], target: Any) -> None:
    rows = []
    for title, key in LATENCIES:
        figures = found[key]
        if figures is None:
            continue
        interval = (figures["ci95"] or {}).get("p95")
        low_high = f"{interval['low'] * 1e3:,.1f} to {interval['high'] * 1e3:,.1f}" if interval else "–"
        cells = [number(figures[k] * 1e3) for k in ("mean", "std", "p50", "p75", "p90", "p95", "p99")]
        rows.append([f"{title} ms", *cells, low_high])
    print_rich_table(
        f"{target.model} at {target.url}, {target.dialect}",
        ("", "mean", "std", "p50", "p75", "p90", "p95", "p99", "p95, 95 % interval"),
        rows,
    )
    print(
        f"{found['completed']} of {found['requests']} requests in {found['span_s']:.1f} s: {found['requests_s']:.2f}/s "
        f"({found['requests_min']:.0f}/min), input {found['input_tok_s']:,.0f} tok/s, output "
        f"{found['output_tok_s']:,.0f} tok/s, at most {found['max_in_flight']} at once"
    )
    if found["failed"]:
        print(f"{found['failed']} failed: {found['errors']}")
    if "goodput_share" in found:
        print(f"goodput: {found['goodput_requests_s']:.2f} requests/s, {found['goodput_share']:.1%} of all")
    if "mfu" in found:
        print(f"of the device: MFU {found['mfu']:.1%}, MBU {found['mbu']:.1%}")
    lag = found["lag"]
    print(f"the load generator lagged {lag['p99_ms']:.1f} ms (p99), used {lag['busy']:.0%} of a core")
