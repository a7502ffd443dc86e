"""Run a command while its processes stand still at random moments, as they do on a machine that others use.

    python tools/jitter.py [--longest-s 2] [--every-s 0.3] [--seed 1] .venv/bin/pytest tests/server -q

One process of the command's tree after the other is stopped for a while and let go on; the others run meanwhile. A test
that waits for a condition passes as before, only later; one that sleeps instead, or asserts how long something took,
fails here sooner or later. Exits as the command does.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, each with what it has started."""
    found: list[int] = []
    with suppress(OSError):  # it may end while it is looked at
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def stop_for(pid: int, seconds: float) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest-s", type=float, default=2.0, help="the longest standstill")
    parser.add_argument("--every-s", type=float, default=0.3, help="the mean time between two of them")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    child = subprocess.Popen(asked.command)
    try:
        while child.poll() is None:
            time.sleep(rng.expovariate(1 / asked.every_s))
            if running := descendants(child.pid):
                # most are short; a few are as long as a machine may stand still
                stop_for(rng.choice(running), min(asked.longest_s, rng.expovariate(4 / asked.longest_s)))
    except KeyboardInterrupt:
        child.terminate()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
