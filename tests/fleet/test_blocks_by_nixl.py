"""Cores that read blocks from each other's memory by NIXL: the same tokens as one core alone."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fleet.test_moving import streams, to_and_fro
from tests.fleet.test_roles import FAMILIES, MORE, NUM_PROMPTS, NUM_TOKENS, answers, config_for, long_prompts
from tests.support.cores_with_sockets import LIMIT_S, always_fetch, folder, nothing, run, unhurried, with_seeds
from tests.support.every_kind_of_request import answer, assert_same, config_of, mixed_requests, special_requests
from tokenmill.config import EngineConfig, ParallelConfig
from tokenmill.fleet.start import start_fleet
from tokenmill.kv.tiers import nixl
from tokenmill.kv.tiers.nixl import MemoryAgent, TransferFailed
from tokenmill.kv.tiers.peer import BlockServer

__all__ = ["always_fetch", "folder", "unhurried"]  # fixtures
pytestmark = pytest.mark.skipif(not nixl.is_installed(), reason='needs `pip install "tokenmill[nixl]"`')


def by_nixl(config: EngineConfig) -> EngineConfig:
    return replace(config, cache=replace(config.cache, kv_transfer="nixl"))


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of blocks that were read; none may come as a record."""
    found: list[int] = []
    read = MemoryAgent.read

    def counted(self: MemoryAgent, other: Any, group: int, blocks: Any, limit_s: float) -> None:
        read(self, other, group, blocks, limit_s)
        found.append(len(blocks))

    def unexpected(*_: Any) -> None:
        raise AssertionError("a record was sent")

    monkeypatch.setattr(MemoryAgent, "read", counted)
    monkeypatch.setattr(BlockServer, "_send_record", unexpected)
    return found


@pytest.mark.usefixtures("unhurried")
def test_streams_move(stories_dir: Path, folder: Path, num_read: list[int]) -> None:
    config = config_of(stories_dir, speculate="off")
    asked = with_seeds(streams(8, 320))
    expected, _ = run(config, folder, asked, 2, nothing)
    found, moved = run(by_nixl(config), folder, asked, 2, to_and_fro(6))
    assert_same(asked, found, expected)
    assert moved.resumed >= 4 and moved.fetched_tokens > 0
    assert sum(num_read) * config.cache.tokens_per_block >= moved.fetched_tokens


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)])
def test_a_decoding_core_computes_a_block_of_each_prompt(
    name: str, folder: Path, stories_dir: Path, shared_dir: Path, num_read: list[int]
) -> None:
    path = stories_dir if name.startswith("stories") else shared_dir / "goldens" / "tiny" / name
    config, asked = config_for(path, **FAMILIES.get(name, {})), long_prompts()
    expected, _ = run(config, folder, asked, 1, nothing)
    found, cores = answers(by_nixl(config), folder, asked)
    assert_same(asked, found, expected)
    recurrent = name in ("lfm2", "qwen3_5", "falcon_h1", "nemotron_h")  # their states lie at multiples of 64 tokens
    most = NUM_PROMPTS * ((64 + 16 if recurrent else 16) + NUM_TOKENS)
    assert cores[1]["step_tokens"] <= most < cores[0]["step_tokens"]
    assert num_read


def test_two_ranks_give_blocks_to_one(folder: Path, stories_dir: Path, num_read: list[int]) -> None:
    asked = long_prompts()
    expected, _ = run(config_for(stories_dir), folder, asked, 1, nothing)
    ranks = replace(by_nixl(config_for(stories_dir)), parallel=ParallelConfig(tp=2, link="threads"))
    found, cores = answers(ranks, folder, asked)
    assert_same(asked, found, expected)
    assert num_read and cores[1]["step_tokens"] <= NUM_PROMPTS * (16 + NUM_TOKENS)


def test_what_can_not_be_read_is_computed(folder: Path, stories_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*_: Any) -> None:
        raise TransferFailed("as if the network were gone")

    monkeypatch.setattr(MemoryAgent, "read", failed)
    config, asked = config_of(stories_dir), with_seeds([*special_requests(), *mixed_requests(8), *long_prompts()])
    expected, _ = run(config, folder, asked, 1, nothing)
    found, cores = answers(by_nixl(config), folder, asked)
    assert_same(asked, found, expected)
    assert cores[0]["num_placed"]["prefill"] >= NUM_PROMPTS


@pytest.mark.slow
def test_processes_read_from_each_other_and_may_die(folder: Path, stories_dir: Path) -> None:
    """The process with the prompts is killed again and again while blocks are on their way: no request fails."""
    config, asked = config_for(stories_dir), [one for turn in range(6) for one in long_prompts(203 + turn)]
    asked = [msgspec.structs.replace(one, request_id=f"{number}") for number, one in enumerate(asked)]
    expected, _ = run(config, folder, asked, 1, nothing)

    async def scenario() -> tuple[list[Any], int, list[dict[str, Any]]]:
        engine = await start_fleet(by_nixl(config), 2, roles="prefill,decode")
        try:
            # What was computed before is the other's to read.
            first = [await answer(engine, one) for one in asked[:NUM_PROMPTS]]
            fetched = engine.stats().fetched_tokens
            answering = [asyncio.create_task(answer(engine, one)) for one in asked[NUM_PROMPTS:]]
            for turn in range(3):
                while not (pid := engine.replicas()[0]["engine_pid"]):
                    await asyncio.sleep(0.01)
                os.kill(pid, signal.SIGKILL)
                while engine.replicas()[0]["restarts"] <= turn:
                    await asyncio.sleep(0.01)
            return [*first, *await asyncio.gather(*answering)], fetched, engine.replicas()
        finally:
            await engine.close()

    found, fetched, cores = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert_same(asked, found, expected)
    assert fetched >= 192, "the first prompt's; it may be faster to compute the others"
    assert cores[0]["restarts"] >= 3
