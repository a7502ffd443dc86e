"""Models with recurrent layers on a real GPU: with deterministic kernels the same bits however a sequence is cut,
cached, forked or preempted; a second turn computes what is new; memory is what was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hybrids import greedy, interrupted, scored, story
from tokenmill import LLM, SamplingParams
from tokenmill.runner.memory import recurrent_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]


def hybrid(shared_dir: Path, name: str = "qwen3_5", **settings: Any) -> LLM:
    settings = {"device": "cuda", "dtype": "float32", "num_blocks": 400, "num_states": 60, "max_running": 6, **settings}
    return LLM(str(shared_dir / "goldens" / "tiny" / name), **settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid", "kimi_linear"])
def test_cuts_prefix_hits_and_samples_change_no_bit(name: str, dtype: str, shared_dir: Path) -> None:
    prompt, settings = story(300), {"deterministic": True, "dtype": dtype}
    whole = hybrid(shared_dir, name, token_budget=512, **settings)
    expected = scored(whole, prompt)
    for budget in (1, 37, 65):
        llm = hybrid(shared_dir, name, token_budget=budget, max_running=min(4, budget), **settings)
        assert scored(llm, prompt) == expected, budget
    plain = hybrid(shared_dir, name, prefix_caching=False, **settings)
    for shared in (63, 64, 65, 128, 150, 256, 299):
        other = prompt[:shared] + story(60, seed=shared)[1:]
        before = whole.core.stats().prefix_hit_tokens
        assert scored(whole, other) == scored(plain, other), shared
        assert whole.core.stats().prefix_hit_tokens - before >= shared // 64 * 64, shared
    samples = {"n": 4, "temperature": 1.0, "seed": 3, "max_tokens": 70}
    assert scored(whole, prompt, **samples) == scored(plain, prompt, **samples)


@pytest.mark.parametrize("positions", [range(60, 71), range(120, 131)])
def test_preemption_changes_no_token(positions: range, shared_dir: Path) -> None:
    llm = hybrid(shared_dir, max_running=1, deterministic=True)
    prompt = story(positions.start - 5)
    expected = greedy(llm, prompt, max_tokens=30)[0]
    before = llm.core.stats().preemptions
    for position in positions:
        assert interrupted(llm, prompt, 30, position) == expected, position
    assert llm.core.stats().preemptions > before


def test_a_second_turn_computes_what_is_new(shared_dir: Path) -> None:
    llm = hybrid(shared_dir)
    turn = story(150)
    second = turn + greedy(llm, turn, max_tokens=20)[0] + story(30, seed=1)[1:]
    (found,) = llm.generate([second], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert found.num_cached_tokens >= len(second) - 29 - 64


def test_few_states_make_requests_wait(shared_dir: Path) -> None:
    prompts = [story(100 + 7 * number, seed=number) for number in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    answers = [
        [answer.outputs[0].token_ids for answer in llm.generate(prompts, params)]
        for llm in (hybrid(shared_dir, deterministic=True, num_states=number) for number in (5, 60))
    ]
    assert answers[0] == answers[1]


def test_states_take_the_planned_bytes(shared_dir: Path) -> None:
    storage = hybrid(shared_dir).core.runner._storage  # type: ignore[attr-defined]
    layout = storage.layout
    blocks = storage.num_blocks * layout.block_bytes(storage.block_size)
    assert storage.num_bytes - blocks == recurrent_bytes(layout, storage.num_states, storage.block_size, max_rows=6)
