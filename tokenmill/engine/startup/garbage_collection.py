"""Settings of Python's garbage collector during a start, while steps run, and while a server streams.

A start imports thousands of modules and loads a model: many objects, hardly any garbage. A full collection then takes a
sixth of a second, and there would be several.

While serving, a full collection scans all live objects: 70 ms with a thousand requests, during which a GPU is idle and
all clients wait. So full collections are made rare. The others run less often than by default too, because a step of a
thousand rows makes thousands of objects that live until the next step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_THRESHOLD = 20_000  # net new objects before a young collection; Python's default is 700 or 2,000
MAX_FROZEN_BY_PYTHON = 1000  # objects frozen when a process starts: 375 in Python 3.12, none in other versions
FULL_THRESHOLD = 200  # collections of the middle generation before a full one; Python's default is 10


@contextmanager
def gc_paused(*, fast_start: bool = True) -> Iterator[None]:
    """Pause garbage collection inside. Without `fast_start` do nothing."""
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
    """Move all live objects to the oldest generation, so that the next young collections need not scan them. Do nothing
    if the program has frozen objects itself, which this would unfreeze."""
    if gc.get_freeze_count() <= MAX_FROZEN_BY_PYTHON:
        gc.freeze()
        gc.unfreeze()


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Raise the collector's thresholds inside, and restore them afterwards."""
    young, middle, full = gc.get_threshold()
    gc.set_threshold(max(young, YOUNG_THRESHOLD), middle, max(full, FULL_THRESHOLD))
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)


def freeze_live_objects() -> None:
    """Exclude all live objects from later collections. Only for core processes, where they live until the end."""
    gc.collect()
    gc.freeze()
