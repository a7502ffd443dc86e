"""The dashboard and the alert rules ask for series that a server has, and are what Grafana and Prometheus read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tokenmill.observe.metrics import EngineState, Metrics, RequestSize, RequestTimes

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
SERIES = re.compile(r"\btokenmill_\w+")
LABELS = re.compile(r"(tokenmill_\w+)\{([^}]*)\}|by \(([^)]*)\)")


def series_of_a_server() -> dict[str, set[str]]:
    """The labels of every series, as one that has worked shows them."""
    metrics = Metrics(model="m")
    model = metrics.of("m")
    model.finish_request("stop", RequestSize(), RequestTimes(1.0))
    model.set_engine(EngineState(0, 0, 0.0, 0, 0, 0))
    metrics.process.note_response(200)
    metrics.process.set_watts({"gpu0": 1.0})
    families = text_string_to_metric_families(metrics.render().decode())
    found: dict[str, set[str]] = {}
    for sample in (sample for family in families for sample in family.samples):
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def require_answerable(expression: str) -> None:
    known = series_of_a_server()
    named = SERIES.findall(expression)
    assert not [name for name in named if name not in known], expression
    everywhere = {"instance", "job"}
    for name, matchers, _ in LABELS.findall(expression):
        for matcher in filter(None, matchers.split(",")):
            assert re.split(r"[=!]", matcher.strip())[0] in known[name] | everywhere, expression
    labels = {label for name in named for label in known[name]} | everywhere
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {label.strip() for label in group.split(",")} <= labels, expression
    for opening, closing in ("()", "[]", "{}"):
        assert expression.count(opening) == expression.count(closing), expression


def test_every_panel_of_the_dashboard_has_series() -> None:
    board: dict[str, Any] = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels), "no panel lies on another"
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(expressions) > 25
    for expression in expressions:
        require_answerable(expression.replace("$__rate_interval", "5m"))
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert "tokenmill_model_info" in variables["model"]["query"]["query"] and "datasource" in variables
    require_answerable(board["annotations"]["list"][0]["expr"])


def test_every_alert_has_series() -> None:
    (group,) = yaml.safe_load((MONITORING / "alert-rules.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) >= 8
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"} and rule["annotations"]["summary"]
        require_answerable(rule["expr"])
