"""The plan a server logs at its start: warnings as warnings, and none at all rather than a start that fails."""

from __future__ import annotations

import logging

import pytest

from tokenmill.server import engine_source


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(engine_source, "log", logging.getLogger("plan-of-a-start"))
    caplog.set_level(logging.INFO)
    return caplog


def test_warnings_are_warnings(lines: pytest.LogCaptureFixture) -> None:
    engine_source.log_plan(["plan: weights 0.10 GB", "plan: warning: does not fit"])
    assert [(r.levelname, r.getMessage()) for r in lines.records] == [
        ("INFO", "plan: weights 0.10 GB"),
        ("WARNING", "plan: does not fit"),
    ]


def test_a_failed_plan_is_one_warning(lines: pytest.LogCaptureFixture) -> None:
    engine_source.log_plan(ZeroDivisionError("of nothing"))
    assert [(r.levelname, r.getMessage()) for r in lines.records] == [
        ("WARNING", "plan: the memory could not be planned: of nothing")
    ]
