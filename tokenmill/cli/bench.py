"""`tokenmill bench …`: one verb, several measurements. A table for people, one JSON object as last line."""

from __future__ import annotations

from cyclopts import App

from tokenmill.cli.bench_engine import compare, latency, startup
from tokenmill.cli.bench_offline import offline
from tokenmill.cli.bench_search import search
from tokenmill.cli.bench_serve import report, serve

command = App(
    help="Measure: the engine alone (offline, latency, startup), a server (serve, search), peers (compare).",
    help_flags=["--help", "-h"],
    version_flags=[],
)
for measurement in (offline, serve, search, latency, startup, compare, report):
    command.command(measurement)
