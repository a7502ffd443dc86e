"""Blocks of a model on several ranks, kept and given away as whole blocks: what two ranks have computed is used by one,
by three, by stages, and back, with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_kv_tiers import LENGTH, NUM_PROMPTS, always_fetch, answers, opened, path_of
from tests.fleet.test_roles import NUM_PROMPTS as NUM_LONG
from tests.fleet.test_roles import NUM_TOKENS, config_for, long_prompts
from tests.fleet.test_roles import answers as answers_of_roles
from tests.support.cores_with_sockets import folder, nothing, run
from tests.support.every_kind_of_request import assert_same
from tests.support.hybrids import story
from tokenmill import SamplingParams
from tokenmill.config import EngineConfig, ParallelConfig
from tokenmill.engine.build import build_core
from tokenmill.engine.core_client import ThreadCoreClient
from tokenmill.engine.core_supervisor import MakeClient
from tokenmill.errors import InvalidConfig
from tokenmill.ops.cpu import is_available

__all__ = ["always_fetch", "folder"]  # fixtures
pytestmark = pytest.mark.skipif(not is_available()[0], reason="ranks compute the same bits with native kernels")

TP2: dict[str, Any] = {"tp": 2, "link": "threads"}
TP3: dict[str, Any] = {"tp": 3, "link": "threads"}
STAGES: dict[str, Any] = {"pp": 2, "link": "threads"}
BOTH: dict[str, Any] = {"tp": 2, "pp": 2, "link": "threads"}
CASES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "stories": ("stories", {}, [TP2, {}, TP3, STAGES, BOTH]),
    "stories, int8 cache": ("stories", {"kv_dtype": "int8"}, [{}, TP2, STAGES]),
    "olmo3": ("olmo3", {}, [TP2, {}]),  # windows
    "deepseek_v3": ("deepseek_v3", {"num_blocks": 80}, [TP2, {}]),  # each rank has all of a block
    "qwen3_5": ("qwen3_5", {"num_states": 30}, [TP2, {}]),  # states of a recurrent rule
}
FAST = "stories", "olmo3"


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_blocks_are_used_by_any_number_of_ranks(name: str, tmp_path: Path, shared_dir: Path, stories_dir: Path) -> None:
    """Each topology reads what the first one has written."""
    family, settings, (first, *others) = CASES[name]
    path = path_of(family, shared_dir, stories_dir)
    expected = answers(opened(path, None, **settings))
    llm = opened(path, tmp_path, **{**settings, "num_blocks": 400}, **first)
    assert answers(llm) == expected
    llm.close()
    for ranks in others:
        again = opened(path, tmp_path, **settings, **ranks)
        assert answers(again) == expected, ranks
        assert again.core.stats().fetched_tokens >= NUM_PROMPTS * (LENGTH // 64 * 64), ranks
        again.close()


def test_ranks_in_processes_share_their_pools_with_the_core(tmp_path: Path, stories_dir: Path) -> None:
    """Ranks use what one process has computed; then one process uses what they have computed."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    other = story(LENGTH, NUM_PROMPTS)
    wanted, roomy = NUM_PROMPTS * (LENGTH // 64 * 64), {"num_blocks": 400}  # nothing leaves the pool before it is saved
    alone = opened(stories_dir, tmp_path, **roomy)
    expected = answers(alone)
    alone.close()
    ranks = opened(stories_dir, tmp_path, tp=2, **roomy)
    assert answers(ranks) == expected
    assert ranks.core.stats().fetched_tokens >= wanted
    answer = ranks.generate([other], params)[0].outputs[0].token_ids
    ranks.close()
    again = opened(stories_dir, tmp_path)
    assert again.generate([other], params)[0].outputs[0].token_ids == answer
    assert again.core.stats().fetched_tokens >= LENGTH // 64 * 64
    again.close()
    assert opened(stories_dir, None).generate([other], params)[0].outputs[0].token_ids == answer


def with_ranks(config: EngineConfig, tp: int) -> EngineConfig:
    return replace(config, parallel=ParallelConfig(tp=tp, link="threads" if tp > 1 else "auto"))


def makers_of(config: EngineConfig, path: Path, folder: Path, sizes: tuple[int, ...]) -> Iterator[MakeClient]:
    for index, tp in enumerate(sizes):
        address = str(folder / f"ranked.{index}")
        yield lambda tp=tp, address=address: ThreadCoreClient(
            lambda: build_core(with_ranks(config, tp), path, block_address=address)
        )


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_prompts_of_two_ranks_are_answered_by_one_and_back(
    sizes: tuple[int, int], folder: Path, stories_dir: Path
) -> None:
    config, asked = config_for(stories_dir), long_prompts()
    expected, _ = run(config, folder, asked, 1, nothing)
    makers = list(makers_of(config, stories_dir, folder, sizes))
    found, cores = answers_of_roles(config, folder, asked, makers=makers)
    assert_same(asked, found, expected)
    assert cores[0]["num_placed"] == {"prefill": NUM_LONG}
    assert cores[1]["step_tokens"] <= NUM_LONG * (16 + NUM_TOKENS)


def test_ranks_whose_blocks_can_not_be_kept_are_named(stories_dir: Path, shared_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="contexts of only some sequences"):
        opened(stories_dir, tmp_path, dp_attention=True, **TP2)
    with pytest.raises(InvalidConfig, match="several kinds of blocks"):
        opened(path_of("olmo3", shared_dir, stories_dir), tmp_path, **STAGES)
