"""How long tests wait for what should be quick.

A shared machine may pause a process for seconds at any time. A limit therefore only tells what is quick from what never
ends; tests that measure work measure processor time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SOON_S = 60.0


def eventually(condition: Callable[[], bool], within_s: float = SOON_S) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return condition()
