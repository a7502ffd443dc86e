"""Prompts computed by one core and answered by another: the same tokens, hardly a prompt token computed twice, and no
failed request when either side dies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import pytest

from tests.support.cores_with_sockets import LIMIT_S, NUMBERS, always_fetch, folder, maker, nothing, run, with_seeds
from tests.support.every_kind_of_request import answer, assert_same, config_of, mixed_requests, special_requests
from tests.support.mortal_core import crashing_clients
from tokenmill import AsyncEngine, SamplingParams
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.engine.build import build_core
from tokenmill.engine.core_supervisor import MakeClient
from tokenmill.engine.frontend import load_frontend
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.engine.roles import Role, read_roles
from tokenmill.errors import InvalidConfig, InvalidRequest
from tokenmill.fleet.autoscale import ScaleRange
from tokenmill.fleet.elastic import start_cluster
from tokenmill.fleet.places import CountedPlace, Places
from tokenmill.fleet.router import PrefixRouter
from tokenmill.kv.tiers.peer import BlockServer
from tokenmill.types import PromptRequest

__all__ = ["always_fetch", "folder"]  # fixtures
NUM_PROMPTS, LENGTH, NUM_TOKENS = 5, 203, 6
SPLIT: tuple[Role, ...] = ("prefill", "decode")


def long_prompts(length: int = LENGTH) -> list[ClientRequest]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [
        PromptRequest(prompt=[1, *range(10 + place, 9 + place + length)], params=params, request_id=f"long {place}")
        for place in range(NUM_PROMPTS)
    ]


def answers(
    config: EngineConfig,
    folder: Path,
    asked: list[ClientRequest],
    roles: Sequence[Role] = SPLIT,
    makers: Sequence[MakeClient] | None = None,
) -> tuple[list[Any], list[dict[str, Any]]]:
    """What cores with roles answer, and what each of them did."""
    frontend = load_frontend(config)

    async def scenario() -> tuple[list[Any], list[dict[str, Any]]]:
        made = makers or [maker(frontend, folder, index) for index in range(len(roles))]
        engine = AsyncEngine(frontend, made, router=PrefixRouter(len(roles)), roles=roles)
        await engine.open()
        try:
            found = await asyncio.gather(*(answer(engine, one) for one in asked), return_exceptions=True)
            return found, engine.replicas()
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def config_for(path: Path, **cache: Any) -> EngineConfig:
    scheduler = SchedulerConfig(max_running=16, token_budget=256, speculate="off")
    model = ModelConfig(model=str(path))
    return EngineConfig(model, CacheConfig(num_blocks=400, **cache), scheduler, OpsConfig(threads=1))


FAMILIES: dict[str, dict[str, Any]] = {"stories": {}, "stories, int8": {"kv_dtype": "int8"}}
MORE = ("olmo3", "gpt_oss", "deepseek_v3", "gemma4", "lfm2", "qwen3_5", "falcon_h1", "nemotron_h", "qwen3_moe")


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)])
def test_a_decoding_core_computes_a_block_of_each_prompt(
    name: str, folder: Path, stories_dir: Path, shared_dir: Path
) -> None:
    path = stories_dir if name.startswith("stories") else shared_dir / "goldens" / "tiny" / name
    config, asked = config_for(path, **FAMILIES.get(name, {})), long_prompts()
    expected, _ = run(config, folder, asked, 1, nothing)
    found, cores = answers(config, folder, asked)
    assert_same(asked, found, expected)
    assert cores[0]["num_placed"] == {"prefill": NUM_PROMPTS}
    recurrent = name in ("lfm2", "qwen3_5", "falcon_h1", "nemotron_h")  # their states lie at multiples of 64 tokens
    most = NUM_PROMPTS * ((64 + 16 if recurrent else 16) + NUM_TOKENS)
    assert cores[1]["step_tokens"] <= most < cores[0]["step_tokens"]


def test_every_kind_of_request_through_two_roles(folder: Path, stories_dir: Path) -> None:
    config = config_of(stories_dir)
    asked = with_seeds([*special_requests(), *mixed_requests(16), *long_prompts()])
    expected, _ = run(config, folder, asked, 1, nothing)
    found, cores = answers(config, folder, asked)
    assert_same(asked, found, expected)
    assert cores[0]["num_placed"]["prefill"] >= NUM_PROMPTS


@pytest.mark.parametrize("dying", [0, 1])
def test_either_side_may_die(dying: int, folder: Path, stories_dir: Path) -> None:
    """The core with the prompts, or the one that answers, dies again and again: the same tokens, and no failure."""
    config, asked = config_for(stories_dir), long_prompts()
    expected, _ = run(config, folder, asked, 1, nothing)
    frontend = load_frontend(config)

    def mortal(index: int) -> MakeClient:
        lives = iter(chain([2, 3, 2], repeat(1 << 60)) if index == dying else repeat(1 << 60))
        return crashing_clients(
            lambda: build_core(
                frontend.config, frontend.model_path, block_address=str(folder / f"{index}.{next(NUMBERS)}")
            ),
            lives,
        )

    found, cores = answers(config, folder, asked, makers=[mortal(0), mortal(1)])
    assert_same(asked, found, expected)
    assert cores[dying]["restarts"] >= 1


def test_bytes_that_flip_on_their_way_change_no_answer(
    folder: Path, stories_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, records, flipped = BlockServer._send_record, count(), list[int]()

    class Damaging:
        """A stream on which every seventh record has a wrong bit."""

        def __init__(self, stream: socket.socket) -> None:
            self._stream = stream

        def sendall(self, data: bytes | memoryview) -> None:
            if len(data) > 100 and (number := next(records)) % 7 == 6:
                flipped.append(number)
                data = bytes([*data[:50], data[50] ^ 4, *data[51:]])
            self._stream.sendall(data)

    def damaged(self: BlockServer, stream: socket.socket, *given: Any) -> None:
        send(self, Damaging(stream), *given)  # type: ignore[arg-type]

    config, asked = config_for(stories_dir), long_prompts()
    expected, _ = run(config, folder, asked, 1, nothing)
    monkeypatch.setattr(BlockServer, "_send_record", damaged)
    found, cores = answers(config, folder, asked)
    assert_same(asked, found, expected)
    assert flipped and cores[0]["num_placed"] == {"prefill": NUM_PROMPTS}


def test_a_cluster_with_roles_keeps_one_of_each(folder: Path, stories_dir: Path) -> None:
    config, asked = config_for(stories_dir), long_prompts()
    expected, _ = run(config, folder, asked, 1, nothing)
    frontend = load_frontend(config)
    makers = iter([maker(frontend, folder, index) for index in range(3)])

    async def scenario() -> tuple[list[Any], list[dict[str, Any]]]:
        places = Places(CountedPlace("here", 3, lambda _: next(makers)()))
        engine = await start_cluster(
            frontend, [config] * 3, places, ScaleRange(2, 2), roles=[*SPLIT, "decode"], num_kept=2
        )
        try:
            found = await asyncio.gather(*(answer(engine, one) for one in asked), return_exceptions=True)
            with pytest.raises(InvalidRequest, match="2 replicas are needed"):
                engine.scale_replicas(1, 3)
            return found, engine.replicas()
        finally:
            await engine.close()

    found, cores = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert_same(asked, found, expected)
    assert [core["role"] for core in cores] == ["prefill", "decode", "decode"]
    assert cores[0]["num_placed"] == {"prefill": NUM_PROMPTS}


def test_roles_that_can_not_work_are_refused() -> None:
    assert read_roles("prefill, decode,any", 3) == ["prefill", "decode", "any"]
    for given, number in (("prefill", 2), ("prefill,prefill", 2), ("decode,decode", 2), ("prefill,drain", 2)):
        with pytest.raises(InvalidConfig):
            read_roles(given, number)
