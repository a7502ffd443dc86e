"""Measured links between two processes of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenmill.bench.links import KINDS, measure_links
from tokenmill.errors import InvalidConfig
from tokenmill.ops.cpu import is_available
from tokenmill.planner.links import find_link


def test_links_are_measured_and_a_plan_reads_them(tmp_path: Path) -> None:
    kinds = ("shared", "pipe") if is_available()[0] else ("pipe",)
    found = measure_links(kinds)
    assert [link.name for link in found] == list(kinds) and set(kinds) <= set(KINDS)
    assert all(0 < link.latency_s < 1 and link.bytes_s > 0 for link in found)
    path = tmp_path / "links.json"
    path.write_text(json.dumps({"benchmark": "links", "links": [link.flat() for link in found]}))
    assert find_link(str(path)).name in kinds
    path.write_text("{}")
    with pytest.raises(InvalidConfig, match="bench links"):
        find_link(str(path))
