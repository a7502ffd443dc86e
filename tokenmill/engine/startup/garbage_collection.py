"""Python's cycle collector during a start, while steps run, and while a server streams what they bring.

A start imports thousands of modules and loads a model: many objects, hardly any garbage. A collection of all of them
takes a sixth of a second, and there would be several.

A full collection looks through everything that lives, 70 ms with a thousand requests, and a GPU that has finished its
step waits for it, or all clients of a server do; so full collections are rare here. The others come less often than by
Python's own thresholds, because a step of a thousand rows makes thousands of objects that live until the next one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_AFTER = 20_000  # objects more than there were; Python's own figure is 700 or 2,000
FROZEN_BY_PYTHON = 1000  # objects at most that are frozen when a process begins: 375 of Python 3.12, none of others
FULL_AFTER = 200  # collections of middle-aged objects; Python's own figure is 10


@contextmanager
def gc_paused(*, fast_start: bool = True) -> Iterator[None]:
    """Inside, nothing is collected. Without `fast_start` nothing is done."""
    if not fast_start or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        age_live_objects()
        gc.enable()


def age_live_objects() -> None:
    """Let all that lives count as old: the next collections of young objects need not look through it. Nothing is done
    where the program has frozen objects of its own, which this would thaw."""
    if gc.get_freeze_count() <= FROZEN_BY_PYTHON:
        gc.freeze()
        gc.unfreeze()


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Inside, collections are rare; afterwards the thresholds are what they were."""
    young, middle, full = gc.get_threshold()
    gc.set_threshold(max(young, YOUNG_AFTER), middle, max(full, FULL_AFTER))
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)


def freeze_live_objects() -> None:
    """Take what lives now, as long as the process, out of all later collections. Only for a process of our own."""
    gc.collect()
    gc.freeze()
