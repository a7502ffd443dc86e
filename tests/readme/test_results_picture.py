"""The README's picture shows figures of the log, and every page it links to is there."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def drawer() -> ModuleType:
    found = importlib.util.spec_from_file_location("draw_results", ROOT / "benchmarks" / "draw_results.py")
    assert found is not None and found.loader is not None
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


TABLE = """# Log

## 2026-01-02 · something else

| what | ours |
|---|---|
| x | 1 |

## 2026-01-01 · a comparison

| file | what | ours | llama.cpp | ratio | OpenVINO | ratio |
|---|---|---|---|---|---|---|
| small & fast | decode 1 | 102 | 69 | 1.5 | 68 | 1.4 |
| | prefill, 1 / 4 prompts | 971 / 1,027 | 213 / 227 | 4 / 5 | 869 / 1,240 | 1 / 2 |
| other | decode 1 | 5 | 6 | 1 | 7 | 1 |
"""


def test_the_newest_comparison_is_drawn() -> None:
    module = drawer()
    found = module.newest_comparison(TABLE)
    assert (found.heading, found.file) == ("2026-01-01 · a comparison", "small & fast")
    decode, prefill = found.phases["decode"], found.phases["prefill"]
    assert [(g.label, g.values) for g in decode] == [("1", {"Tokenmill": 102, "OpenVINO": 68, "llama.cpp": 69})]
    assert [(g.label, g.values["OpenVINO"]) for g in prefill] == [("1", 869), ("4", 1240)]
    picture = ElementTree.fromstring(module.drawing(found))
    words = [element.text for element in picture.iter() if element.text]
    assert {"1,240", "102", "4 sequences"} <= set(words) and "7" not in words


def test_the_log_has_such_a_comparison_and_the_readme_the_picture() -> None:
    found = drawer().newest_comparison((ROOT / "docs" / "LOG.md").read_text(encoding="utf-8"))
    assert set(found.phases) == {"decode", "prefill"}
    ElementTree.fromstring((ROOT / "docs" / "results.svg").read_text(encoding="utf-8"))
    assert "](docs/results.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_page_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
