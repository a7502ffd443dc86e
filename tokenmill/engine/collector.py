"""Python's cycle collector while steps run.

Short-lived cycles are collected as always. A full collection looks through everything that lives, 30 ms with a
thousand requests, and a GPU that has finished its step waits for it; so full ones come seldom.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FULL_AFTER = 200  # collections of middle-aged objects; Python's own figure is 10


@contextmanager
def seldom_full() -> Iterator[None]:
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, max(full, FULL_AFTER))
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)
