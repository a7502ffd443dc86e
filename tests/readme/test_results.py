"""Recorded measurements are complete, and the pages made from them are up to date."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted(path for path in (ROOT / "docs" / "experiments").glob("*.md") if path.name != "README.md")


def load_publisher() -> ModuleType:
    found = importlib.util.spec_from_file_location("publish_results", ROOT / "benchmarks" / "publish_results.py")
    assert found is not None and found.loader is not None
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


PUBLISHER = load_publisher()
RESULTS = PUBLISHER.load_results()


def measurement(**changed: Any) -> Any:
    figures = [
        {"phase": "decode", "sequences": 1, "unit": "tok/s", "Tokenmill": 102, "llama.cpp": 69, "OpenVINO": 68},
        {"phase": "prefill", "sequences": 4, "unit": "tok/s", "Tokenmill": 971, "llama.cpp": 227, "OpenVINO": 1240},
    ]
    fields = {"file": Path("x.json"), "subject": "s", "title": "small & fast", "date": "2026-01-01", "commit": "abc",
              "machine": "m", "software": {}, "command": "c", "notes": [], "figures": figures}  # fmt: skip
    return PUBLISHER.Measurement(**{**fields, **changed})


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_a_measurement_says_where_when_and_how(file: Path) -> None:
    (found,) = [one for series in RESULTS.values() for one in series if one.file == file]
    assert file.name.startswith(f"{found.subject}.{found.date}.")
    assert re.fullmatch(r"2\d{3}-\d\d-\d\d", found.date) and re.fullmatch(r"[0-9a-f]{7,12}", found.commit)
    assert found.title and found.machine and found.command and found.figures
    for figure in found.figures:
        assert any(isinstance(value, int | float | list) for value in figure.values()) or len(figure) > 2


def test_the_page_and_the_picture_are_up_to_date() -> None:
    advice = "run python benchmarks/publish_results.py"
    assert PUBLISHER.PAGE.read_text(encoding="utf-8") == PUBLISHER.page(RESULTS), advice
    kept = words_of(PUBLISHER.PICTURE.read_text(encoding="utf-8"))  # places may differ with the fonts of a machine
    assert kept == words_of(PUBLISHER.drawing(RESULTS[PUBLISHER.CHART_SUBJECT][-1])), advice
    assert "](docs/results.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_newest_file_of_a_subject_is_shown_and_older_ones_are_linked() -> None:
    older = measurement(figures=[{"what": "x", "old": 1}], commit="aaa")
    shown = PUBLISHER.section([older, measurement()])
    assert "| decode | 1 | tok/s | 102 | 69 | 68 |" in shown
    assert "| old |" not in shown and "Earlier: [2026-01-01, aaa](../benchmarks/results/x.json)" in shown


def test_values_are_shown_with_their_spread() -> None:
    values = [None, 1234, 0.5, "as is", [1, 2], [1.7, 1.68, 1.83]]
    assert list(map(PUBLISHER.shown, values)) == ["–", "1,234", "0.5", "as is", "1 to 2", "1.7 (1.68–1.83)"]


def words_of(picture: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(picture).iter() if element.text and element.text.strip()]


def test_the_picture_has_a_bar_for_each_engine() -> None:
    picture = PUBLISHER.drawing(measurement())
    assert {"1,240", "102", "4 sequences", "1 sequence", "OpenVINO"} <= set(words_of(picture))
    assert picture.count('aria-roledescription="bar"') == 6


def test_growth_is_of_figures_measured_more_than_once() -> None:
    older = measurement(figures=[{"phase": "decode", "sequences": 1, "unit": "tok/s", "Tokenmill": 90}], commit="aaa")
    ((title, rows),) = PUBLISHER.growth({"s": [older, measurement()]})
    assert title == "small & fast" and len(rows) == 1
    assert (rows[0].name, rows[0].values) == ("decode, 1 sequence", [("aaa", 90.0), ("abc", 102.0)])
    assert PUBLISHER.middle([1, 2]) == 1.5 and PUBLISHER.middle([3, 1, 4]) == 3 and PUBLISHER.middle("7 s") is None
    assert PUBLISHER.growth(RESULTS)  # of the recorded ones, some


@pytest.mark.parametrize("page", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_is_what_was_tried_what_came_and_what_was_decided(page: Path) -> None:
    entries = re.split(r"^### ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert entries
    for entry in entries:
        labels = re.findall(r"^- \*\*(\w+)\*\*: \S", entry, flags=re.MULTILINE)
        assert labels == ["Tried", "Result", "Decision"], entry.splitlines()[0]


def test_every_page_of_experiments_is_listed() -> None:
    index = (ROOT / "docs" / "experiments" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in EXPERIMENTS if f"]({page.name})" not in index] == []
