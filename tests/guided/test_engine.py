"""Constrained answers through the whole engine, alone and together with everything else that a request may ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.engine.results import RequestOutput
from tokenmill.errors import InvalidRequest
from tokenmill.params import BeamParams, Guided

PERSON = {
    "type": "object",
    "properties": {
        "first_name_of_the_person": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "is_happy": {"type": "boolean"},
    },
    "required": ["first_name_of_the_person", "age", "is_happy"],
    "additionalProperties": False,
}
SCHEMA, REGEX = Guided.schema(PERSON), Guided("regex", r"(Lily|Tim) is [0-9]{2} years old\.")
PROMPT = "Once upon a time there was a girl"


def ask(llm: LLM, guided: Guided | None = SCHEMA, prompt: str = PROMPT, **params: Any) -> RequestOutput:
    params = SamplingParams(**{"max_tokens": 150, "seed": 7, "guided": guided, **params})
    return llm.generate([prompt], params, progress=False)[0]


def steps_of(llm: LLM, **params: Any) -> tuple[RequestOutput, int]:
    before = llm.core.stats().steps
    return ask(llm, **params), llm.core.stats().steps - before


def check(guided: Guided, text: str) -> None:
    if guided is SCHEMA:
        jsonschema.validate(json.loads(text), PERSON)
    else:
        assert text.startswith(("Lily is ", "Tim is ")) and text.endswith(" years old."), text


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("guided", [SCHEMA, REGEX])
def test_a_whole_answer_follows(llm: LLM, guided: Guided, temperature: float) -> None:
    for seed in range(5):
        output = ask(llm, guided, temperature=temperature, seed=seed).outputs[0]
        assert output.finish_reason == "stop"
        check(guided, output.text)


def test_forced_tokens_are_not_drawn_and_count_as_output(llm: LLM) -> None:
    answer, steps = steps_of(llm)
    tokens = answer.outputs[0].token_ids
    assert steps * 1.5 < len(tokens)
    assert "".join(llm.frontend.tokenizer.token_text(i) for i in tokens[:-1]) == answer.outputs[0].text  # type: ignore[union-attr]


PAIRS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2},
    "n": {"n": 3},
    "best of": {"n": 1, "best_of": 1},
    "bias of 0": {"logit_bias": {5: 0.0}},
}


@pytest.mark.parametrize("guided", [SCHEMA, REGEX])
@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_that_must_not_change_a_token(llm: LLM, guided: Guided, pair: str) -> None:
    alone = ask(llm, guided).outputs[0]
    together = ask(llm, guided, **PAIRS[pair])
    assert together.outputs[0].token_ids == alone.token_ids
    for output in together.outputs:
        check(guided, output.text)


def test_logprobs_are_the_model_s_own(llm: LLM) -> None:
    """Those of an answer are what scoring the same tokens as a prompt says: no mask has touched them."""
    output = ask(llm, logprobs=0).outputs[0]
    prompt_ids = llm.frontend.tokenizer.encode(PROMPT)  # type: ignore[union-attr]
    scored = llm.generate(
        [[*prompt_ids, *output.token_ids]], SamplingParams(max_tokens=1, prompt_logprobs=0), progress=False
    )[0].prompt_logprobs
    assert scored is not None and output.logprobs is not None
    expected = [info.logprob for info in scored[len(prompt_ids) :] if info is not None]
    shown = [info.logprob for info in output.logprobs]
    assert shown == pytest.approx(expected[: len(shown)], abs=1e-4)


@pytest.mark.parametrize("guided", [SCHEMA, REGEX])
def test_beams_follow_and_the_best_beats_greedy(llm: LLM, guided: Guided) -> None:
    greedy = ask(llm, guided, temperature=0.0, logprobs=0).outputs[0]
    beams = ask(llm, guided, n=2, beam=BeamParams(4, length_penalty=0.0)).outputs
    for output in beams:
        check(guided, output.text)
    assert beams[0].cumulative_logprob is not None and greedy.cumulative_logprob is not None
    assert beams[0].cumulative_logprob >= greedy.cumulative_logprob - 1e-4
    assert beams[0].text != beams[1].text


@pytest.mark.parametrize(
    "params", [{"frequency_penalty": 1.5}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 8}]
)
def test_history_holds_forced_tokens(llm: LLM, params: dict[str, Any]) -> None:
    """Drawn one by one or jumped, penalties see the same past."""
    jumped = ask(llm, **params)
    drawn = ask(llm, **params, logprobs=0)
    assert jumped.error == drawn.error
    assert jumped.outputs[0].token_ids == drawn.outputs[0].token_ids


def test_a_stop_string_cuts_wherever_it_stands(llm: LLM) -> None:
    output = ask(llm, stop=['"age'], include_stop=False).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", '"age')
    assert output.text.endswith('", ') and "age" not in output.text


def test_the_length_cuts_forced_tokens_too(llm: LLM) -> None:
    whole = ask(llm).outputs[0]
    for max_tokens in (1, 4, 9, len(whole.token_ids) - 1):
        cut = ask(llm, max_tokens=max_tokens).outputs[0]
        assert cut.finish_reason == "length"
        assert cut.token_ids == whole.token_ids[:max_tokens]


def test_strangers_change_nothing(llm: LLM) -> None:
    alone = [ask(llm, guided, seed=3).outputs[0].token_ids for guided in (SCHEMA, REGEX, None)]
    params = [SamplingParams(max_tokens=150, seed=3, guided=guided) for guided in (SCHEMA, REGEX, None)]
    together = llm.generate([PROMPT] * 3, params, progress=False)
    assert [answer.outputs[0].token_ids for answer in together] == alone


def test_preempted_answers_are_the_same(stories_dir: Path, llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=100, seed=seed, guided=(SCHEMA, REGEX)[seed % 2], frequency_penalty=0.5)
        for seed in range(8)
    ]
    expected = [answer.outputs[0].token_ids for answer in llm.generate([PROMPT] * 8, params, progress=False)]
    tight = LLM(str(stories_dir), backend="reference", threads=1, num_blocks=26, block_size=8, max_context=192)
    answers = tight.generate([PROMPT] * 8, params, progress=False)
    assert tight.core.stats().preemptions > 0
    assert [answer.outputs[0].token_ids for answer in answers] == expected


def test_a_schema_that_can_t_be_enforced_stops_nothing_else(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="#/properties/a/not"):
        ask(llm, Guided.schema({"properties": {"a": {"not": {}}}}))
    check(SCHEMA, ask(llm).outputs[0].text)


def test_masks_that_leave_nothing_fail_one_request(llm: LLM) -> None:
    tokenizer = llm.frontend.tokenizer
    assert tokenizer is not None
    params = [
        SamplingParams(max_tokens=20, guided=REGEX, allowed_token_ids=[tokenizer.encode("zoo")[-1]]),
        SamplingParams(max_tokens=60, guided=REGEX, seed=1),
    ]
    failed, good = llm.generate([PROMPT] * 2, params, progress=False)
    assert failed.error is not None and "no token is left" in failed.error
    check(REGEX, good.outputs[0].text)


@pytest.mark.parametrize("place", [1, 2, 8])  # of forced tokens: a word, a space, a letter
@pytest.mark.parametrize("kind", ["banned", "allowed", "bias", "early stop"])
def test_a_forced_token_that_is_unwelcome_is_spelled_otherwise(llm: LLM, kind: str, place: int) -> None:
    unwelcome = ask(llm, REGEX).outputs[0].token_ids[place]
    params: dict[str, dict[str, Any]] = {
        "banned": {"banned_token_ids": [unwelcome]},
        "allowed": {"allowed_token_ids": [i for i in range(512) if i != unwelcome]},
        "bias": {"logit_bias": {unwelcome: -100.0}},
        "early stop": {"stop_token_ids": [unwelcome], "min_tokens": 40},
    }
    jumped, drawn = ask(llm, REGEX, **params[kind]), ask(llm, REGEX, **params[kind], logprobs=0)
    assert unwelcome not in jumped.outputs[0].token_ids and jumped.outputs[0].finish_reason == "stop"
    assert drawn.outputs[0].token_ids == jumped.outputs[0].token_ids
    check(REGEX, jumped.outputs[0].text)


def test_ignoring_the_end_ignores_no_stop_that_was_named(llm: LLM) -> None:
    some, stop = Guided("regex", r"[a-z ]+"), {"logit_bias": {410: 100.0}, "stop_token_ids": [410]}
    assert ask(llm, some, ignore_eos=True, **stop).outputs[0].stop_reason == 410


def test_a_cached_prompt_changes_nothing(llm: LLM) -> None:
    prompt = PROMPT * 6
    first, second = ask(llm, prompt=prompt), ask(llm, prompt=prompt)
    assert second.num_cached_tokens > first.num_cached_tokens == 0
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize(
    "params", [{"ignore_eos": True}, {"min_tokens": 40}, {"min_tokens": 40, "beam": BeamParams(2)}]
)
def test_a_grammar_that_is_over_ends_whatever_else_is_asked(llm: LLM, params: dict[str, Any]) -> None:
    output = ask(llm, REGEX, **params).outputs[0]
    assert output.finish_reason == "stop" and len(output.token_ids) < 40
    check(REGEX, output.text)


def test_the_end_is_held_back_as_long_as_the_grammar_has_more(llm: LLM) -> None:
    some, eager = Guided("regex", r"(ha)+"), {"logit_bias": {llm.frontend.eos_token_ids[0]: 100.0}}
    assert len(ask(llm, some, **eager).outputs[0].token_ids) < 5
    output = ask(llm, some, min_tokens=30, **eager).outputs[0]
    assert output.finish_reason == "stop" and 30 < len(output.token_ids) < 35
    assert set(output.text.split("ha")) == {""}
    endless = ask(llm, some, ignore_eos=True, max_tokens=60, **eager).outputs[0]
    assert (endless.finish_reason, len(endless.token_ids)) == ("length", 60)


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 2.0},
        {"logit_bias": {410: 6.0}},
        {"no_repeat_ngram_size": 2},
        {"dry_multiplier": 50.0, "dry_allowed_length": 0},
    ],
)
def test_beams_heed_what_changes_logits(llm: LLM, params: dict[str, Any]) -> None:
    """With one beam, beam search is greedy search."""
    shared: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    greedy = ask(llm, None, **shared, **params).outputs[0]
    beam = ask(llm, None, **shared, **params, beam=BeamParams(1)).outputs[0]
    assert beam.token_ids == greedy.token_ids
    assert greedy.token_ids != ask(llm, None, **shared).outputs[0].token_ids
