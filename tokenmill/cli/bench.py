"""`tokenmill bench …`: the benchmarks. Each prints a table, and one JSON object as its last line."""

from __future__ import annotations

from cyclopts import App

from tokenmill.cli.bench_engine import compare, latency, links, offline, startup
from tokenmill.cli.bench_serve import report, search, serve

command = App(
    help="Benchmark the engine (offline, latency, startup, links), a server (serve, search), other engines (compare).",
    help_flags=["--help", "-h"],
    version_flags=[],
)
for measurement in (offline, serve, search, latency, startup, links, compare, report):
    command.command(measurement)
