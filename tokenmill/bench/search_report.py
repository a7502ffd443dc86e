"""A search for people: the curve of every limit's figure against the level, as rows and as a page."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.bench.measures import median
from tokenmill.bench.search import Trial, Verdict
from tokenmill.report.charts import Axis, Series, line_chart, page, table


def curve_rows(trials: Sequence[Trial]) -> list[list[str]]:
    rows = []
    for level in sorted({trial.level for trial in trials}):
        at = [trial for trial in trials if trial.level == level]
        figures = [f"{median([trial.measured[name] for trial in at]) * 1e3:.1f}" for name in at[0].measured]
        passed = f"{sum(trial.passed for trial in at)}/{len(at)}"
        why = next((trial.reason for trial in at if trial.reason), "")
        rows.append([f"{level:g}", passed, *figures, f"{median([trial.output_tok_s for trial in at]):,.0f}", why])
    return rows


def curve_titles(trials: Sequence[Trial]) -> list[str]:
    limits = [f"{name.split('=')[0]} ms" for name in trials[0].measured] if trials else []
    return ["level", "passed", *limits, "output tok/s", "why not"]


def sentence(verdict: Verdict, what: str) -> str:
    low, high = verdict.likely
    spread = f", likely between {low:g} and {high:g}" if low != high else ""
    sure = f"{verdict.confidence:.0%} sure from {len(verdict.trials)} trials{spread}"
    sure += "; cut short" if verdict.was_cut_short else ""
    if verdict.best is None:
        return f"Not even {what} {verdict.first_failing:g} is within the limits ({sure})."
    if verdict.first_failing is None:
        highest = "tried so far" if verdict.was_cut_short else "asked for"
        return f"{what.capitalize()} {verdict.best:g}, the highest {highest}, is within the limits ({sure})."
    return f"The largest {what} within the limits is {verdict.best:g}; {verdict.first_failing:g} is not ({sure})."


def html_search(verdict: Verdict, what: str) -> str:
    names = list(verdict.trials[0].measured) if verdict.trials else []
    charts = []
    for name in names:
        points = sorted((trial.level, trial.measured[name] * 1e3) for trial in verdict.trials)
        limit = float(name.split("=")[1].removesuffix("ms"))
        levels = [points[0][0], points[-1][0]]
        lines = [Series("measured", points), Series("limit", [(level, limit) for level in levels])]
        charts.append(line_chart(name.split("=")[0], Axis(what), Axis("ms"), lines))
    speed = sorted((trial.level, trial.output_tok_s) for trial in verdict.trials)
    charts.append(line_chart("Throughput", Axis(what), Axis("output tokens/s"), [Series("measured", speed)]))
    rows = table(curve_titles(verdict.trials), curve_rows(verdict.trials))
    return page("Search: " + sentence(verdict, what), [*charts, rows])
