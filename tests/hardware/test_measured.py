"""What this machine can do is measured in rounds, of which the disturbed ones do not count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tokenmill.hardware.measured import LEAST_ROUNDS, core_flops, read_bandwidth

PAUSE_S = 0.3


def slow_at_first(work: Callable[..., Any], num_slow: int) -> Callable[..., Any]:
    """Work that others keep from the processor the first few times."""
    pauses: Iterator[float] = iter([PAUSE_S] * num_slow)

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(next(pauses, 0.0))
        return work(*args, **kwargs)

    return disturbed


def test_a_disturbed_first_round_is_not_the_machines_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(np, "matmul", slow_at_first(np.matmul, 1))
        assert core_flops(PAUSE_S / 2) > 1e9, "or a server says that a token takes seconds"
    with monkeypatch.context() as patched:
        patched.setattr(np, "max", slow_at_first(np.max, 4))
        assert read_bandwidth(1, PAUSE_S / 2) > 1e9
    assert LEAST_ROUNDS > 4
