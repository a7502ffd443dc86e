"""The page of attacks names tests that exist."""

from __future__ import annotations

import re

from tests.support.terminal import ROOT

PAGE = ROOT / "docs" / "design" / "attacks.md"


def test_every_line_names_a_test_that_exists() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    checked = 0
    for row in rows:
        tests = row.split("|")[-2]
        if not (named := re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", tests)):
            assert tests.strip() in ("test", "---"), f"no test: {row}"
            continue
        path = ""
        for given, name in named:
            path = given or path
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {name}"
            checked += 1
    assert checked > 50
