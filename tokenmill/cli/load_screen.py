"""What a run under load shows: one live line meanwhile, a table and a few sentences at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tokenmill.cli.tables import number, print_rich_table

if TYPE_CHECKING:
    from tokenmill.bench.load import LoadRun, Target

LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("end to end", "e2e"))
COLUMNS = ("mean", "std", "p50", "p75", "p90", "p95", "p99")


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
        f"{found['output_tok_s']:,.0f} tok/s, at most {found['max_in_flight']} at once"
    )
    if found["failed"]:
        yield f"{found['failed']} failed: {', '.join(f'{why} {times} times' for why, times in found['errors'].items())}"
    if "goodput_share" in found:
        yield f"goodput: {found['goodput_requests_s']:.2f} requests/s, {found['goodput_share']:.1%} of all"
    if "mfu" in found:
        yield f"of the device: MFU {found['mfu']:.1%}, MBU {found['mbu']:.1%}"
    lag = found["lag"]
    yield f"the load generator lagged {lag['p99_ms']:.1f} ms (p99), used {lag['busy']:.0%} of a core"
