"""How long tests wait for what shall be quick. A machine that others use may stand still for seconds at any moment, so
a limit only tells what is quick from what would never end; where a test counts work, it counts processor time.
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
