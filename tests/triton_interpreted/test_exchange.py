"""Exchanges between ranks by a kernel, over memory that processes share: parts of all come together on each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.support.exchange_program import WINDOW_BYTES
from tokenmill.ops.triton.batch.exchange import num_programs

LIMIT_S = 100


def run_ranks(ranks: Sequence[int], size: int, task: str) -> None:
    descriptor = os.memfd_create("windows")
    try:
        os.ftruncate(descriptor, (1 + size) * WINDOW_BYTES)
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.exchange_program", *map(str, (descriptor, rank, size)), task],
                pass_fds=[descriptor],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in ranks
        ]
        try:
            errors = [one.communicate(timeout=LIMIT_S)[1] for one in started]
        finally:
            for one in started:
                one.kill()
                one.wait()
        assert [one.returncode for one in started] == [0] * len(started), "\n".join(errors)[-3000:]
    finally:
        os.close(descriptor)


def test_parts_of_all_ranks_come_together() -> None:
    """Uneven parts, words of every size, rows of a larger tensor, more than a window has room for, many turns."""
    run_ranks(range(3), 3, "join")


def test_numbers_of_all_ranks_are_added_up() -> None:
    """In one exchange and in two, more than a window has room for, between other exchanges."""
    run_ranks(range(3), 3, "sum")


def test_a_wait_for_a_rank_that_never_comes_is_ended() -> None:
    run_ranks([0], 2, "stop")


@pytest.mark.parametrize("ranks_of_device", [1, 2, 3, 4, 8, 16])
def test_ranks_that_wait_leave_multiprocessors_to_the_one_that_they_wait_for(ranks_of_device: int) -> None:
    """Eight ranks with 32 programs each had one waiting on every multiprocessor of an H200, and matrix products that
    need a whole one never began."""
    programs = num_programs(ranks_of_device)
    assert 1 <= programs <= 32
    assert (ranks_of_device - 1) * programs < 58, "an L4 has so many"
