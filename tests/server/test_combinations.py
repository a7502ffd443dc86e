"""Every pair of features works as each does alone, or is refused by name; docs/COMBINATIONS.md says which, truly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.combination_pairs import PAIRS, Pair, PairVerdict, TrialEngines, same_together, verdict
from tests.support.server_process import ServerProcess, real_server
from tests.support.write_combinations import TABLE, page

VERDICTS: dict[Pair, PairVerdict] = {}
"""Filled by the tests, one pair each; the last ones look at all of them."""


@pytest.fixture(scope="module")
def bench(stories_dir: Path) -> TrialEngines:
    return TrialEngines(stories_dir)


@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
def test_pair(names: Pair, bench: TrialEngines) -> None:
    VERDICTS[names] = verdict(bench, names)


def all_verdicts(bench: TrialEngines) -> dict[Pair, PairVerdict]:
    return {names: VERDICTS.get(names) or verdict(bench, names) for names in PAIRS}


def test_pairs_say_the_same_among_strangers(bench: TrialEngines) -> None:
    same_together(bench, [names for names, found in all_verdicts(bench).items() if found.refusal is None])


def test_the_table_is_up_to_date(bench: TrialEngines) -> None:
    assert TABLE.read_text(encoding="utf-8") == page(all_verdicts(bench)), (
        "run python -m tests.support.write_combinations"
    )


@pytest.fixture(scope="module")
def process(stories_dir: Path) -> Iterator[ServerProcess]:
    with real_server(stories_dir, scheduler={"max_running": 8}) as started:
        started.wait_for("ready")
        yield started


def test_a_server_says_the_same(bench: TrialEngines, process: ServerProcess) -> None:
    for names, found in all_verdicts(bench).items():
        body = bench.body(names, is_tried=found.refusal is None)
        reply = process.http.post("/v1/completions", json={**body, "model": "tiny"})
        if found.refusal is None:
            assert reply.status_code == 200, (names, reply.text)
        else:
            assert reply.status_code == 400 and found.refusal in reply.json()["error"]["message"], (names, reply.text)
