"""The cycle collector's settings hold during a start or while steps run, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tokenmill.engine.startup.garbage_collection import FULL_THRESHOLD, YOUNG_THRESHOLD, gc_paused, relaxed_gc


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    """A test run freezes what exists after collection."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def test_full_collections_are_seldom_inside_only() -> None:
    before = gc.get_threshold()
    with relaxed_gc():
        assert gc.get_threshold() == (max(before[0], YOUNG_THRESHOLD), before[1], max(before[2], FULL_THRESHOLD))
    assert gc.get_threshold() == before


def test_a_failure_inside_leaves_the_settings_as_they_were() -> None:
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), relaxed_gc():
        1 / 0  # noqa: B018
    assert gc.get_threshold() == before


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_nothing_is_collected_during_a_start_and_what_it_made_counts_as_old() -> None:
    gc.collect()
    with gc_paused():
        assert not gc.isenabled()
        lost = weakref.ref(Cycle())
        kept = [[number] for number in range(5 * gc.get_threshold()[0])]
        assert lost() is not None
        with gc_paused():
            pass
        assert not gc.isenabled(), "one that is inside another changes nothing"
    assert gc.isenabled() and len(gc.get_objects(0)) < len(kept)
    gc.collect()
    assert lost() is None


def test_what_a_program_has_frozen_stays_so() -> None:
    frozen = Cycle()
    gc.freeze()
    try:
        with gc_paused():
            pass
        assert gc.isenabled()
        assert not any(one is frozen for one in gc.get_objects()), "frozen objects are not listed, thawed ones are"
    finally:
        gc.unfreeze()


def test_without_a_fast_start_collections_go_on() -> None:
    with gc_paused(fast_start=False):
        assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "a program that has switched it off keeps it off"
    finally:
        gc.enable()
