"""The cycle collector's settings hold while steps run, and no longer."""

from __future__ import annotations

import gc

import pytest

from tokenmill.engine.startup.garbage_collection import FULL_AFTER, YOUNG_AFTER, relaxed_gc


def test_full_collections_are_seldom_inside_only() -> None:
    before = gc.get_threshold()
    with relaxed_gc():
        assert gc.get_threshold() == (max(before[0], YOUNG_AFTER), before[1], max(before[2], FULL_AFTER))
    assert gc.get_threshold() == before


def test_a_failure_inside_leaves_the_settings_as_they_were() -> None:
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), relaxed_gc():
        1 / 0  # noqa: B018
    assert gc.get_threshold() == before
