"""Samplers through the whole engine: preempted, forked, beside strangers, and in text."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill import LLM, SamplingParams
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.results import CompletionOutput
from tokenmill.errors import InvalidRequest
from tokenmill.params import BeamParams, Watermark
from tokenmill.sampling.watermark import detect_watermark
from tokenmill.types import PromptRequest

PROMPT = "Once upon a time"
KEY = 20261115
PARAM_NAMES: list[dict[str, Any]] = [
    {"mirostat": 2, "mirostat_tau": 3.0},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"watermark": Watermark(key=KEY, context=2)},
    {"dynatemp_range": 0.8, "eta_cutoff": 1e-3},
    {"thinking_budget": 12, "thinking_markers": ("Once", "happy")},
    {"mirostat": 2, "watermark": Watermark(key=KEY), "frequency_penalty": 0.4, "n": 2},
    {"logits_processors": [lambda output, logits: logits + 0.05 * len(output) * torch.sin(logits)]},
    {"stop_regex": [r"[.!]\s+[A-Z]"]},
]


def ask(llm: LLM, prompt: str = PROMPT, **params: Any) -> list[CompletionOutput]:
    params = SamplingParams(**{"max_tokens": 60, "seed": 5, **params})
    [answer] = llm.generate([prompt], params, progress=False)
    assert answer.error is None, answer.error
    return answer.outputs


def test_preempted_beside_strangers_and_forked_rows_draw_the_same(stories: LLM, stories_dir: Path) -> None:
    alone = [[output.token_ids for output in ask(stories, **params)] for params in PARAM_NAMES]
    tight = LLM(str(stories_dir), threads=1, num_blocks=26, block_size=8, max_context=192)
    params = [SamplingParams(max_tokens=60, seed=5, **params) for params in PARAM_NAMES]
    together = tight.generate([PROMPT] * len(PARAM_NAMES), params, progress=False)
    assert tight.core.stats().preemptions > 0
    assert [[output.token_ids for output in answer.outputs] for answer in together] == alone


def test_guessed_tokens_change_no_draw(stories_dir: Path) -> None:
    """Text that repeats itself is guessed well; what remembers surprises or tokens must still draw the same."""
    prompt = " ".join(["The cat sat on the mat and the dog ran to the park."] * 4)
    plain, guessing = (LLM(str(stories_dir), threads=1, speculate=mode) for mode in ("off", "ngram"))
    num_right = 0
    for params in PARAM_NAMES:
        params = SamplingParams(max_tokens=60, seed=5, **{"temperature": 0.3, **params})
        expected, found = (llm.generate([prompt], params, progress=False)[0] for llm in (plain, guessing))
        assert [one.token_ids for one in found.outputs] == [one.token_ids for one in expected.outputs], params
        num_right += found.num_accepted_tokens
    assert num_right > 20


def test_the_end_of_thinking_is_written_when_the_budget_is_spent(stories: LLM) -> None:
    tokenizer = stories.frontend.tokenizer
    assert tokenizer is not None
    end = tokenizer.encode("happy", add_special_tokens=False)
    for budget in (0, 1, 7):
        [output] = ask(stories, thinking_budget=budget, thinking_markers=("Once", "happy"), max_tokens=30)
        assert output.token_ids[budget : budget + len(end)] == end
        assert len(output.token_ids) == 30  # what is written counts
    free = ask(stories, max_tokens=30)[0].token_ids
    assert ask(stories, thinking_budget=3, thinking_markers=("Nowhere", "happy"), max_tokens=30)[0].token_ids == free
    with pytest.raises(InvalidRequest, match="think sections"):
        ask(stories, thinking_budget=3)


def test_a_stop_regex_cuts_across_tokens(stories: LLM) -> None:
    [free] = ask(stories, temperature=0.0, max_tokens=80)
    match = re.search(r"[.!]\s+[A-Z]", free.text)
    assert match is not None
    [stopped] = ask(stories, temperature=0.0, max_tokens=80, stop_regex=[r"[.!]\s+[A-Z]"])
    assert (stopped.text, stopped.finish_reason) == (free.text[: match.start()], "stop")
    assert stopped.stop_reason == r"[.!]\s+[A-Z]"
    assert len(stopped.token_ids) < len(free.token_ids)
    [later] = ask(stories, temperature=0.0, max_tokens=80, stop_regex=[r"[.!]\s+[A-Z]"], min_tokens=60)
    assert len(later.text) > len(stopped.text)
    with pytest.raises(InvalidRequest, match="lookaround"):
        ask(stories, stop_regex=["(?=a)"])


def test_functions_stay_in_their_own_process(stories_dir: Path) -> None:
    async def submit() -> None:
        ops, cache = OpsConfig(threads=1), CacheConfig(num_blocks=20)
        config = EngineConfig(ModelConfig(model=str(stories_dir), max_context=64), cache, ops=ops)
        engine = await AsyncEngine.start(config, in_process=True)
        try:
            params = SamplingParams(logits_processors=[lambda output, logits: logits])
            with pytest.raises(InvalidRequest, match="functions of the calling process"):
                engine.submit(PromptRequest(prompt="x", params=params))
        finally:
            await engine.close()

    asyncio.run(submit())


def test_a_function_that_raises_fails_one_request(stories: LLM) -> None:
    def wrong(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("seven is not a colour")

    params = [SamplingParams(max_tokens=5, logits_processors=[wrong]), SamplingParams(max_tokens=5, seed=1)]
    failed, fine = stories.generate([PROMPT] * 2, params, progress=False)
    assert failed.error is not None and "seven is not a colour" in failed.error
    assert fine.error is None and len(fine.outputs[0].token_ids) == 5


# ── beams ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stop", [["play"], [" lo"], [". "], ["zebra", "e w"]])
def test_beams_end_at_stop_strings(stories: LLM, stop: list[str]) -> None:
    beams = ask(stories, beam=BeamParams(4), n=4, stop=stop, max_tokens=40)
    assert any(output.stop_reason in stop for output in beams)
    for output in beams:
        assert not any(text in output.text for text in stop)
        assert output.finish_reason == ("stop" if output.stop_reason else "length")
        if output.stop_reason:  # it ended there: nothing was computed beyond
            [kept] = ask(stories, beam=BeamParams(4), n=4, stop=stop, max_tokens=40, include_stop=True)[
                beams.index(output) : beams.index(output) + 1
            ]
            assert kept.text == output.text + str(output.stop_reason)
            assert kept.token_ids == output.token_ids


def test_one_beam_with_a_stop_string_is_greedy_with_it(stories: LLM) -> None:
    for stop, min_tokens in ((["play"], 0), ([" and"], 0), ([" and"], 30), (["ark"], 12)):
        shared: dict[str, Any] = {"temperature": 0.0, "stop": stop, "min_tokens": min_tokens, "max_tokens": 70}
        [greedy], [beam] = ask(stories, **shared), ask(stories, beam=BeamParams(1), **shared)
        assert (beam.text, beam.stop_reason, beam.token_ids) == (greedy.text, greedy.stop_reason, greedy.token_ids)


# ── the watermark, in text ─────────────────────────────────────────────────────────────────────────────


def z_scores(llm: LLM, texts: list[str], mark: Watermark) -> list[float]:
    tokenizer = llm.frontend.tokenizer
    assert tokenizer is not None
    return [detect_watermark(mark, tokenizer.encode(text, add_special_tokens=False)).z_score for text in texts]


def stories_of(llm: LLM, count: int, mark: Watermark | None, seed: int) -> list[str]:
    """Texts of 200 tokens each."""
    shared: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "watermark": mark}
    params = [SamplingParams(seed=seed + number, **shared) for number in range(count)]
    answers = llm.generate([PROMPT] * count, params, progress=False)
    return [answer.outputs[0].text for answer in answers]


def test_watermarked_texts_are_told_from_plain_ones(
    stories: LLM, shared_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts as a reader has them: cut into tokens anew, the prompt unknown."""
    mark = Watermark(key=KEY)
    marked = z_scores(stories, stories_of(stories, 40, mark, seed=0), mark)
    words = (shared_dir / "traces" / "sonnet.txt").read_text().split()
    excerpts = [" ".join(words[start : start + 80]) for start in range(0, 4000, 10)]  # 400 of about 200 tokens
    plain = z_scores(stories, [*excerpts, *stories_of(stories, 100, None, seed=1000)], mark)
    wrong_key = z_scores(stories, stories_of(stories, 10, mark, seed=50), Watermark(key=KEY + 1))
    false_alarms = sum(z > 4 for z in plain)
    with capsys.disabled():
        print(f"\nwatermark: lowest z {min(marked):.1f} of 40, {false_alarms} false alarms of 500 ({max(plain):.1f})")
    assert min(marked) > 4
    assert len(plain) == 500 and false_alarms < 5
    assert max(wrong_key) < 4
