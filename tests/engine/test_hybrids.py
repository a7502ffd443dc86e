"""Models with recurrent layers (gated DeltaNet, Mamba-2): golden answers of trained weights, and the same tokens
however a sequence is cut, cached, forked, preempted or drafted for. States lie at multiples of 64 tokens, so it is
around those that most tests look."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.hybrids import MODELS, RANDOM, WrongDrafts, greedy, interrupted, scored, story, tiny
from tests.support.mixed_requests import Answers, make_requests, run_together
from tokenmill import LLM, SamplingParams
from tokenmill.arch.read import read_spec
from tokenmill.arch.recurrent import Recurrent
from tokenmill.errors import InvalidConfig
from tokenmill.ops.cpu import is_available
from tokenmill.runner.memory import recurrent_bytes

CLOSE_CALL = 1e-3  # a smaller margin in the golden answers may fall either way
native = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
SETTINGS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "one token at a time": {"token_budget": 16, "max_running": 16},
    "small odd chunks": {"token_budget": 37, "max_running": 23},
    "pools that are far too small": {"num_blocks": 60, "num_states": 9, "max_running": 32},
    "n-gram drafts, few states": {"speculate": "ngram", "token_budget": 96, "num_states": 20},
}


def cases_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "golden_greedy.json").read_text())["cases"]
    return found


def hybrid(shared_dir: Path, name: str = "qwen3_5", backend: str = "reference", **settings: Any) -> LLM:
    settings = {"speculate": "off", "threads": 1, **settings}
    return LLM(str(tiny(shared_dir, name)), backend=backend, device="cpu", **settings)


# ── golden answers ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "reference") for name in MODELS),
        *(pytest.param(name, "cpu", marks=native) for name in MODELS),
    ],
)
def test_golden_answers(name: str, backend: str, shared_dir: Path) -> None:
    """Greedy tokens and logprobs of a float64 computation, with prompts in odd chunks."""
    llm = hybrid(shared_dir, name, backend, token_budget=48, max_running=10, kv_dtype="float32")
    compare_golden_answers(llm, cases_of(tiny(shared_dir, name))[-3:], at_least=130)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=native)])
@pytest.mark.parametrize("name", MODELS)
def test_every_golden_answer(name: str, backend: str, shared_dir: Path) -> None:
    llm = hybrid(shared_dir, name, backend, token_budget=100, kv_dtype="float32")
    compare_golden_answers(llm, cases_of(tiny(shared_dir, name)), at_least=500)


def compare_golden_answers(llm: LLM, cases: list[dict[str, Any]], at_least: int) -> None:
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
    assert compared >= at_least


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
    assert storage.num_bytes - blocks == (
        storage.num_states * layout.state_bytes + storage.num_cells * layout.cells_bytes(16)
    )
    assert storage.num_bytes - blocks == recurrent_bytes(layout, storage.num_states, 16, max_rows=4)  # what is planned


def test_a_model_of_recurrent_layers_alone(shared_dir: Path) -> None:
    """Blocks hold a number per token and limit no context; prefixes are found, and most memory is for states."""
    llm = hybrid(shared_dir, "mamba2", max_running=4)
    storage = llm.core.runner.storage  # type: ignore[attr-defined]
    layout = storage.layout
    assert [group.kind for group in layout.groups] == ["paged", "cells", "state"]
    assert layout.block_bytes(16) == 16 * 4 and layout.state_bytes == 3 * 4 * (6 * 16 * 16 + 3 * (2 * 16 + 96))
    prompt = story(900)
    expected = greedy(llm, prompt)
    assert greedy(llm, prompt) == expected and llm.core.stats().prefix_hit_tokens >= 896
    assert llm.core.stats().kv_blocks_used == 0


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


def test_preemption_around_a_state(shared_dir: Path) -> None:
    llm = hybrid(shared_dir, max_running=1)
    expected = greedy(llm, story(50), max_tokens=30)[0]
    for position in (62, 63, 64, 65):
        before = llm.core.stats().preemptions
        assert interrupted(llm, story(50), 30, position) == expected, position
        assert llm.core.stats().preemptions == before + 1


# ── to the last bit, with native kernels ───────────────────────────────────────────────────────────────


IN_DEFAULT_RUN = ("qwen3_5", "granitemoehybrid")
EVERY = [pytest.param(name, marks=() if name in IN_DEFAULT_RUN else pytest.mark.slow) for name in (*MODELS, *RANDOM)]


@native
@pytest.mark.parametrize("name", EVERY)
def test_cuts_prefix_hits_and_samples_change_no_bit(name: str, shared_dir: Path) -> None:
    """A prompt of 300 tokens at once, token by token, in odd chunks, after prefix hits, with drafts, with siblings."""
    prompt = story(300)
    whole = hybrid(shared_dir, name, "cpu", token_budget=512)
    expected = scored(whole, prompt)
    assert scored(hybrid(shared_dir, name, "cpu", token_budget=1, max_running=1), prompt) == expected
    for budget in (7, 37, 63, 65):
        assert scored(hybrid(shared_dir, name, "cpu", token_budget=budget, max_running=4), prompt) == expected, budget
    for shared in (63, 64, 65, 128, 150, 192, 256, 299):
        other = prompt[:shared] + story(60, seed=shared)[1:]
        plain = hybrid(shared_dir, name, "cpu", prefix_caching=False)
        before = whole.core.stats().prefix_hit_tokens
        assert scored(whole, other) == scored(plain, other), shared
        assert whole.core.stats().prefix_hit_tokens - before >= shared // 64 * 64, shared
    long = scored(whole, prompt, max_tokens=60)
    assert scored(hybrid(shared_dir, name, "cpu", speculate="ngram"), prompt, max_tokens=60) == long
    wrong, drafter = hybrid(shared_dir, name, "cpu", speculate="ngram"), WrongDrafts()
    wrong.core._scheduler._drafter = drafter
    assert scored(wrong, prompt, max_tokens=60) == long
    assert drafter.num_proposed > 100
    samples = {"n": 4, "temperature": 1.0, "seed": 3, "max_tokens": 30}
    assert scored(whole, prompt, **samples) == scored(
        hybrid(shared_dir, name, "cpu", token_budget=9, max_running=5, prefix_caching=False), prompt, **samples
    )


@native
@pytest.mark.parametrize("positions", [range(60, 71), range(120, 131)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3_5" else pytest.mark.slow) for name in (*MODELS, *RANDOM)]
)
def test_preemption_at_every_position_changes_no_token(name: str, positions: range, shared_dir: Path) -> None:
    for caching in (False, True):
        llm = hybrid(shared_dir, name, "cpu", max_running=1, prefix_caching=caching)
        prompt = story(positions.start - 5)
        expected = greedy(llm, prompt, max_tokens=30)[0]
        for position in positions:
            before = llm.core.stats().preemptions
            assert interrupted(llm, prompt, 30, position) == expected, position
            assert llm.core.stats().preemptions == before + 1


@pytest.fixture(scope="module")
def alone(shared_dir: Path) -> Answers:
    return run_together(hybrid(shared_dir, backend="cpu", prefix_caching=False), make_requests(7, 60), rng=None)


@native
@pytest.mark.parametrize("setting", SETTINGS)
def test_mixed_requests_together_and_alone(setting: str, alone: Answers, shared_dir: Path) -> None:
    """To the last bit of every logprob; with samples of n > 1, which are forks."""
    asks = make_requests(7, 60)
    llm = hybrid(shared_dir, backend="cpu", **SETTINGS[setting])
    assert run_together(llm, asks, random.Random(setting)) == alone
    stats = llm.core.stats()
    assert stats.kv_blocks_used == 0 and stats.prefix_hit_tokens > 0


@native
@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *RANDOM])
def test_a_second_turn_and_few_states(name: str, shared_dir: Path) -> None:
    """What is cached of a first turn is computed no more; where states are for two sequences, eight wait for theirs."""
    llm = hybrid(shared_dir, name, "cpu")
    turn = story(150)
    second = turn + greedy(llm, turn, max_tokens=20)[0] + story(30, seed=1)[1:]
    (found,) = llm.generate([second], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert found.num_cached_tokens >= len(turn) + 20 - 64
    plain = hybrid(shared_dir, name, "cpu", prefix_caching=False)
    assert found.outputs[0].token_ids == greedy(plain, second, 5)[0]
    few = hybrid(shared_dir, name, "cpu", num_states=5, max_running=8)
    prompts = [story(100 + 7 * number, seed=number) for number in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    together = [answer.outputs[0].token_ids for answer in few.generate(prompts, params)]
    assert together == [greedy(plain, prompt, 40)[0] for prompt in prompts]
    assert few.core.stats().kv_blocks_used == 0


@native
@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *RANDOM])
def test_a_thousand_random_interleavings(name: str, shared_dir: Path) -> None:
    """200 mixed requests of each model, five times together: in another order, with other pools, budgets and drafts."""
    asks = make_requests(11)
    alone = run_together(hybrid(shared_dir, name, "cpu", prefix_caching=False), asks, rng=None)
    for number, settings in enumerate(SETTINGS.values()):
        llm = hybrid(shared_dir, name, "cpu", **settings)
        assert run_together(llm, asks, random.Random(number)) == alone, settings
