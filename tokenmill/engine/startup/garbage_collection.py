"""Python's cycle collector while steps run, and while a server streams what they bring.

A full collection looks through everything that lives, 70 ms with a thousand requests, and a GPU that has finished its
step waits for it, or all clients of a server do; so full collections are rare here. The others come less often than by
Python's own thresholds, because a step of a thousand rows makes thousands of objects that live until the next one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_AFTER = 20_000  # objects more than there were; Python's own figure is 700 or 2,000
FULL_AFTER = 200  # collections of middle-aged objects; Python's own figure is 10


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
