"""Memory that ends while an engine is put together: one clear line that names what to lower, whatever was at it."""

from __future__ import annotations

import pytest
import torch

from tokenmill.engine.build import out_of_memory_hint, run_largest_step
from tokenmill.errors import InvalidConfig


class LargeStepRunner:
    """A runner whose largest step runs out of memory if it needs more than `free_bytes`."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.calls: list[tuple[int, int]] = []

    def run_largest_step(self, num_tokens: int, step_bytes: int, while_compiling: object) -> None:
        self.calls.append((num_tokens, step_bytes))
        if step_bytes > self.free_bytes:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")


def test_what_is_planned_for_steps_is_taken_at_start_or_refused() -> None:
    runner = LargeStepRunner(1000)
    run_largest_step(runner, 64, 1000, list)
    assert runner.calls == [(64, 1000)]
    with pytest.raises(InvalidConfig, match="largest step does not fit") as caught:
        run_largest_step(runner, 64, 1001, list)
    assert caught.value.param == "token_budget" and "memory_fraction" in str(caught.value.hint)


def test_other_problems_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match="else"), out_of_memory_hint("it does not fit", "memory_fraction"):
        raise ValueError("something else")
