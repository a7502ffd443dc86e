"""Replicas of several ranks each: a rank's death is its replica's, whose requests go on in the other one with the same
tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.test_moving import streams
from tests.support.cores_with_sockets import with_seeds
from tests.support.every_kind_of_request import answer, assert_same, config_of
from tokenmill import AsyncEngine
from tokenmill.config import EngineConfig, ParallelConfig
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.fleet.start import start_fleet

pytestmark = pytest.mark.slow
LIMIT_S = 180.0


def ranks_of(pid: int) -> list[int]:
    """Return the processes of a core's other ranks."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return [int(child) for child in children]


async def answers(config: EngineConfig, asked: list[ClientRequest], num_kills: int) -> tuple[list[Any], int]:
    engine: AsyncEngine = await start_fleet(config, 2)
    try:
        tasks = [asyncio.create_task(answer(engine, one)) for one in asked]
        for turn in range(num_kills):
            core = engine.replicas()[turn % 2]
            while not core["running"] or not (ranks := ranks_of(core["engine_pid"])):
                await asyncio.sleep(0.005)
                core = engine.replicas()[turn % 2]
            os.kill(ranks[0], signal.SIGKILL)
            while engine.stats().restarts < turn + 1 or not engine.replicas()[turn % 2]["running"]:
                if all(task.done() for task in tasks):
                    break
                await asyncio.sleep(0.005)
        return await asyncio.gather(*tasks, return_exceptions=True), engine.stats().restarts
    finally:
        await engine.close()


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2), ParallelConfig(pp=2)], ids=["tp", "pp"])
def test_a_rank_that_is_killed_costs_no_answer(parallel: ParallelConfig, stories_dir: Path) -> None:
    config, asked = config_of(stories_dir, speculate="off"), with_seeds(streams(6, 400))
    expected, _ = asyncio.run(asyncio.wait_for(answers(config, asked, 0), LIMIT_S))
    ranked = replace(config, parallel=parallel)
    found, num_restarts = asyncio.run(asyncio.wait_for(answers(ranked, asked, 1), LIMIT_S))
    assert_same(asked, found, expected)
    assert num_restarts >= 1
