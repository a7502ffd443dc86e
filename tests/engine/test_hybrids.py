"""Models with recurrent layers (gated DeltaNet, Mamba-2): golden answers of trained weights, and the same tokens
however a sequence is cut, cached, forked, preempted or drafted for. States lie at multiples of 64 tokens, so it is
around those that most tests look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.arch.read import read_spec
from tokenmill.arch.recurrent import Recurrent
from tokenmill.errors import InvalidConfig
from tokenmill.types import PromptRequest

CLOSE_CALL = 1e-3  # a smaller margin in the golden answers may fall either way
MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "granitemoehybrid", "nemotron_h")


def tiny(shared_dir: Path, name: str) -> Path:
    return shared_dir / "goldens" / "tiny" / name


def cases_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "golden_greedy.json").read_text())["cases"]
    return found


def hybrid(shared_dir: Path, name: str = "qwen3_5", backend: str = "reference", **settings: Any) -> LLM:
    settings = {"speculate": "off", "threads": 1, **settings}
    return LLM(str(tiny(shared_dir, name)), backend=backend, device="cpu", **settings)


def story(length: int, seed: int = 0) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(3, 512, length - 1).tolist()]


def greedy(llm: LLM, prompt: list[int], max_tokens: int = 6, **changes: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)
    (answer,) = llm.generate([prompt], params)
    return [output.token_ids for output in answer.outputs]


# ── golden answers ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
def test_golden_answers(name: str, shared_dir: Path) -> None:
    """Greedy tokens and logprobs of a float64 computation, with prompts in odd chunks."""
    llm = hybrid(shared_dir, name, token_budget=48, max_running=10)
    cases = cases_of(tiny(shared_dir, name))[-3:]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    answers = llm.generate([case["prompt_ids"] for case in cases], params)
    compared = 0
    for case, answer in zip(cases, answers, strict=True):
        output = answer.outputs[0]
        assert output.logprobs is not None and answer.prompt_logprobs is not None
        prompt = [one.logprob for one in answer.prompt_logprobs[1:] if one is not None]
        assert prompt == pytest.approx(case["prompt_logprobs_from_second_token"], abs=1e-3)
        for step, token, info in zip(case["greedy"], output.token_ids, output.logprobs, strict=True):
            if step["margin"] < CLOSE_CALL:
                break
            assert token == step["id"]
            assert info.logprob == pytest.approx(step["logprob"], abs=1e-3)
            compared += 1
    assert compared >= 150


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────


def test_states_and_cells_are_counted_in_bytes(shared_dir: Path) -> None:
    """A slot is the state of every recurrent layer with kernel - 1 inputs of its convolution, as the planner counts."""
    spec = read_spec(tiny(shared_dir, "qwen3_5"))
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Recurrent)]
    assert len(mixers) == 3
    storage = hybrid(shared_dir, max_context=256, max_running=4).core.runner.storage  # type: ignore[attr-defined]
    layout = storage.layout
    assert layout.state_bytes == 3 * 4 * (4 * 16 * 16 + 3 * (2 * 2 * 16 + 4 * 16))
    assert layout.cells_bytes(16) == 16 * 3 * 4 * (128 + 2 * 16 + 4 * 16 + 4)
    blocks = storage.num_blocks * layout.block_bytes(16)
    assert storage.num_bytes == (
        blocks + storage.num_states * layout.state_bytes + storage.num_cells * layout.cells_bytes(16)
    )


def test_a_block_must_fit_between_two_states(shared_dir: Path) -> None:
    with pytest.raises(InvalidConfig, match="block_size must divide 64"):
        hybrid(shared_dir, block_size=24)
    assert greedy(hybrid(shared_dir, block_size=64), story(70)) == greedy(hybrid(shared_dir, block_size=8), story(70))


def test_states_are_only_for_recurrent_layers(stories_dir: Path) -> None:
    with pytest.raises(InvalidConfig, match="num_states"):
        LLM(str(stories_dir), num_states=8)


# ── the same tokens ────────────────────────────────────────────────────────────────────────────────────


def test_a_second_turn_computes_what_is_new(shared_dir: Path) -> None:
    llm = hybrid(shared_dir)
    turn = story(150)
    answer = greedy(llm, turn, max_tokens=20)[0]
    second = turn + answer + story(30, seed=1)[1:]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    (found,) = llm.generate([second], params)
    num_new = len(second) - len(turn) - len(answer)
    assert found.num_cached_tokens >= len(second) - num_new - 64
    assert found.outputs[0].token_ids == greedy(hybrid(shared_dir, prefix_caching=False), second, 5)[0]


def test_few_states_make_requests_wait(shared_dir: Path) -> None:
    """With room for two sequences, eight get the answers that each of them gets alone."""
    llm = hybrid(shared_dir, num_states=5, max_running=8)
    prompts = [story(100 + 7 * number, seed=number) for number in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    together = [answer.outputs[0].token_ids for answer in llm.generate(prompts, params)]
    assert together == [greedy(hybrid(shared_dir), prompt, 40)[0] for prompt in prompts[:2]] + together[2:]
    assert llm.core.stats().kv_blocks_used == 0


def interrupted(llm: LLM, prompt: list[int], max_tokens: int, position: int) -> list[int]:
    """The tokens of a request beside which an urgent one arrives once `position` of its tokens are known."""
    tokens: list[int] = []
    add_greedy(llm, "patient", prompt, max_tokens, priority=1)
    while llm.core.has_work:
        if len(prompt) + len(tokens) == position:
            add_greedy(llm, "urgent", story(20, seed=1), max_tokens=2, priority=0)
            position = -1
        tokens += [token for one in llm.core.step() if one.request_id == "patient" for token in one.token_ids]
    return tokens


def add_greedy(llm: LLM, name: str, prompt: list[int], max_tokens: int, priority: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    asked = PromptRequest(prompt=prompt, params=params, request_id=name, priority=priority)
    llm.core.add(llm.frontend.input_processor(512).process(asked))


def test_preemption_around_a_state(shared_dir: Path) -> None:
    llm = hybrid(shared_dir, max_running=1)
    expected = greedy(llm, story(50), max_tokens=30)[0]
    for position in (62, 63, 64, 65):
        before = llm.core.stats().preemptions
        assert interrupted(llm, story(50), 30, position) == expected, position
        assert llm.core.stats().preemptions == before + 1
