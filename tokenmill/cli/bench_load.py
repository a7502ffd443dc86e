"""Load generation shared by `bench serve` and `bench search`: groups of flags, live progress, and the final report."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from tokenmill.cli.flags import Amount, Count, CountOrZero, Needs, Switch, refuse_idle, require_page
from tokenmill.cli.output import number, print_rich_table
from tokenmill.errors import InvalidConfig, RequestFailed

if TYPE_CHECKING:
    from tokenmill.bench.load import ClosedLoop, LoadRun, OpenLoop, Target
    from tokenmill.bench.workloads import Workload


@dataclass(frozen=True)
class TargetConfig:
    url: str = "http://127.0.0.1:8000"
    """URL of the server."""
    model: str | None = None
    """Name of the model; by default the first that the server lists."""
    dialect: str = "openai-chat"
    """API of the requests: openai-chat, openai-completions, anthropic, ollama or tgi."""
    api_key: str | None = field(default=None, repr=False)
    """API key, sent in the dialect's header."""
    timeout_s: Amount = 600.0
    """Seconds after which a request counts as failed."""

    def target(self) -> Target:
        from tokenmill.bench.load import Target

        return Target(self.url, self.model or self._first_model(), self.dialect, self.api_key, self.timeout_s)

    def _first_model(self) -> str:
        base = self.url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise InvalidConfig(f"{self.url!r} is not a URL such as http://127.0.0.1:8000", param="url")
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        request = urllib.request.Request(f"{base}/v1/models", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return str(json.load(reply)["data"][0]["id"])
        except urllib.error.HTTPError as problem:
            raise RequestFailed(
                f"{base} does not list its models: {problem}", hint="set --api-key or --model"
            ) from None
        except OSError as problem:
            why = getattr(problem, "reason", problem)
            raise RequestFailed(f"{base} can't be reached: {why}", hint="tokenmill serve starts a server") from None
        except (ValueError, KeyError, IndexError, TypeError) as problem:
            raise RequestFailed(f"{base} does not list its models: {problem}", hint="set --model") from None


# Options that only some workloads use, and those that have no effect with a trace, which has its own lengths.
READ_BY = {
    "file": ("text", "lengths"),
    "schema": ("schema",),
    "prefix_len": ("shared-prefix",),
    "num_prefixes": ("shared-prefix",),
    "turns": ("multi-turn",),
}
UNUSED_WITH_TRACE = ("workload", "input_len", "output_len", *READ_BY)


@dataclass(frozen=True)
class WorkloadConfig:
    workload: str = "random"
    """Kind of requests: random, text, lengths (from a CSV), shared-prefix, multi-turn or schema."""
    input_len: str = "128"
    """Prompt tokens: a number or LOW:HIGH."""
    output_len: str = "64"
    """Answer tokens: a number or LOW:HIGH."""
    prefix_len: Count = 256
    """Length of each shared prefix in tokens."""
    num_prefixes: Count = 4
    """Number of different shared prefixes."""
    turns: Count = 4
    """Turns per conversation (multi-turn)."""
    file: Path | None = None
    """File with the text (text) or the CSV of lengths (lengths)."""
    schema: Path | None = None
    """JSON schema that answers must follow (schema)."""
    max_input: Count | None = None
    """Maximum prompt tokens; longer prompts of a CSV or trace are cut."""
    max_output: Count | None = None
    """Maximum answer tokens; longer answers of a CSV or trace are cut."""
    bench_seed: int = 0
    """Random seed of prompts, lengths and arrivals."""

    def sessions(self, *, has_trace: bool = False) -> Workload:
        """Return the requests to send (with a trace: for the warm-up); raise InvalidConfig for a wrong kind or file."""
        from tokenmill.bench.traffic import Lengths
        from tokenmill.bench.workloads import Workload

        refuse_idle(self, self._needs(has_trace))
        work = Workload(
            kind=self.workload,
            input_len=Lengths.parse(self.input_len, "input-len"),
            output_len=Lengths.parse(self.output_len, "output-len"),
            prefix_len=self.prefix_len,
            num_prefixes=self.num_prefixes,
            turns=self.turns,
            file=self.file,
            schema=_read_schema(self.schema) if self.schema else None,
            max_input=self.max_input,
            max_output=self.max_output,
            seed=self.bench_seed,
        )
        next(iter(work.sessions()))
        return work

    def _needs(self, has_trace: bool) -> Needs:
        needs = {name: (self.workload in kinds, f"--workload {kinds[0]}") for name, kinds in READ_BY.items()}
        cuts = (has_trace or self.workload == "lengths", "--workload lengths or --trace")
        made_up = (self.workload != "lengths", "another workload than lengths")
        needs |= {"max_input": cuts, "max_output": cuts, "input_len": made_up, "output_len": made_up}
        return needs | dict.fromkeys(UNUSED_WITH_TRACE, (False, "a load without --trace")) if has_trace else needs


def _read_schema(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise InvalidConfig(f"{path} can't be read: {problem}", param="schema") from None
    if not isinstance(found, dict):
        raise InvalidConfig(f"{path} is not a JSON schema: it must be an object", param="schema")
    return found


@dataclass(frozen=True)
class RunConfig:
    warmup: CountOrZero = 2
    """Number of warm-up requests before the measurement."""
    max_lag_ms: Amount = 20.0
    """Maximum lag of the load generator's own event loop (99th percentile); slower runs are not reported."""
    html: Path | None = None
    """Write a page with charts to this file."""
    json: Switch = False
    """Print one JSON object instead of tables; into a pipe it is always printed as the last line."""

    def run(self, target: Target, load: ClosedLoop | OpenLoop, work: Workload) -> LoadRun:
        from itertools import islice

        from tokenmill.bench.load import run_load
        from tokenmill.cli.bench_load import live_progress

        require_page(self.html)
        with live_progress() as progress:
            run = run_load(target, load, warmup=islice(work.sessions(), self.warmup), progress=progress)
        assert run.lag is not None
        run.lag.refuse_beyond(self.max_lag_ms)
        return run

    def write_page(self, page: str) -> None:
        assert self.html is not None
        self.html.write_text(page, encoding="utf-8")


TargetFlags = Annotated[TargetConfig, Parameter(name="*", group=Group.create_ordered("Server under test"))]
WorkloadFlags = Annotated[WorkloadConfig, Parameter(name="*", group=Group.create_ordered("Requests"))]
RunFlags = Annotated[RunConfig, Parameter(name="*", group=Group.create_ordered("Measurement"))]
TARGET, WORKLOAD, RUN = TargetConfig(), WorkloadConfig(), RunConfig()


def closed_load(work: Workload, concurrency: int, num_requests: int | None, duration_s: float | None) -> ClosedLoop:
    from tokenmill.bench.load import ClosedLoop

    return ClosedLoop(concurrency, work.sessions(), num_requests, duration_s)


def settings_of(*groups: Any, **more: Any) -> dict[str, Any]:
    """Return all settings needed to repeat the run, without the API key."""
    known = {key: value for group in groups for key, value in asdict(group).items()} | more
    known.pop("api_key", None)
    return {key: str(value) if isinstance(value, Path) else value for key, value in known.items() if value is not None}


LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("end to end", "e2e"))
COLUMNS = ("mean", "std", "p50", "p75", "p90", "p95", "p99")


# ── the report ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def live_progress() -> Iterator[Callable[[LoadRun], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:

        def show(run: LoadRun) -> None:
            failed = sum(record.error is not None for record in run.records)
            pieces = sum(len(record.times_s) for record in run.records[-2000:])
            line = f"{run.now_s:6.1f} s   {run.in_flight} running   {run.done} done   {failed} failed   {pieces} pieces"
            live.update(Text(line))

        yield show


def show_run(found: dict[str, Any], target: Target) -> None:
    rows = [_latency_row(title, found[key]) for title, key in LATENCIES if found[key] is not None]
    title = f"{target.model} at {target.url}, {target.dialect}"
    if rows:
        print_rich_table(title, ("", *COLUMNS, "p95, 95 % interval"), rows)
    for sentence in _sentences(found):
        print(sentence)


def _latency_row(title: str, figures: dict[str, Any]) -> list[str]:
    interval = (figures["ci95"] or {}).get("p95")
    low_high = f"{interval['low'] * 1e3:,.1f} to {interval['high'] * 1e3:,.1f}" if interval else "–"
    return [f"{title} ms", *[number(figures[column] * 1e3) for column in COLUMNS], low_high]


def _sentences(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{found['completed']} of {found['requests']} requests in {found['span_s']:.1f} s: {found['requests_s']:.2f}/s "
        f"({found['requests_min']:.0f}/min), input {found['input_tok_s']:,.0f} tok/s, output "
        f"{found['output_tok_s']:,.0f} tok/s, at most {found['max_in_flight']} concurrent requests"
    )
    if found["failed"]:
        yield f"{found['failed']} failed: {', '.join(f'{why} {times} times' for why, times in found['errors'].items())}"
    if "goodput_share" in found:
        yield f"goodput: {found['goodput_requests_s']:.2f} requests/s, {found['goodput_share']:.1%} of all"
    if "mfu" in found:
        yield f"share of the device's peak: MFU {found['mfu']:.1%}, MBU {found['mbu']:.1%}"
    lag = found["lag"]
    yield f"the load generator lagged {lag['p99_ms']:.1f} ms (p99), used {lag['busy']:.0%} of a core"
