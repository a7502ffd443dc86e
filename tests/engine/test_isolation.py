"""One request can never hurt or change another: whatever goes wrong with it, the pool is as before and the others'
tokens are what they are without it."""

from __future__ import annotations

import pytest
import torch

from tests.support.scripted_engine import MAX_CONTEXT, VOCAB, byte_input_processor, run, scripted_core, tokens_of
from tokenmill import SamplingParams
from tokenmill.engine.core import MAX_CONSECUTIVE_FAILURES
from tokenmill.errors import ContextLengthExceeded, InvalidRequest
from tokenmill.kv.storage import KVStorage
from tokenmill.ops.batch import ForwardBatch
from tokenmill.sampling.sampler import Sampler
from tokenmill.testing.scripted_models import ContextModel
from tokenmill.types import PromptRequest, RowInit

POISON = 250
GOOD = [
    PromptRequest(prompt=f"prompt number {n}", request_id=f"good{n}", params=SamplingParams(max_tokens=20, seed=n))
    for n in range(5)
]


def expected() -> dict[str, list[int]]:
    return {name: tokens_of(outputs) for name, outputs in run(scripted_core(), GOOD).items()}


def test_nan_logits_end_their_own_request_only() -> None:
    core = scripted_core(ContextModel(VOCAB, nan_token=POISON))
    bad = PromptRequest(prompt=[1, 2, POISON, 3], request_id="bad", params=SamplingParams(max_tokens=20))
    outputs = run(core, [*GOOD[:3], bad, *GOOD[3:]])
    assert outputs["bad"][-1].finish_reason == "error"
    assert "NaN" in (outputs["bad"][-1].error or "")
    reference = {name: tokens for name, tokens in expected().items() if POISON not in tokens}
    assert len(reference) >= 3, "the script must leave something to compare"
    assert {name: tokens_of(outputs[name]) for name in reference} == reference
    assert core.stats().kv_blocks_used == 0


@pytest.mark.parametrize("after_steps", [0, 1, 3, 8])
def test_an_abort_leaves_nothing_behind(after_steps: int) -> None:
    core = scripted_core(num_blocks=40)
    long = PromptRequest(prompt="x" * 60, request_id="gone", params=SamplingParams(max_tokens=60, n=3))
    for one in [GOOD[0], long, *GOOD[1:]]:
        core.add(byte_input_processor().process(one))
    outputs: dict[str, list[int]] = {}
    for step in range(10_000):
        if step == after_steps:
            core.abort("gone")
            core.abort("gone")  # twice is once
        for output in core.step():
            assert step < after_steps or output.request_id != "gone"
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
        if not core.has_work:
            break
    outputs.pop("gone", None)
    assert outputs == expected()
    assert core.stats().kv_blocks_used == 0


def test_wrong_requests_never_reach_the_engine() -> None:
    input_processor = byte_input_processor()
    with pytest.raises(ContextLengthExceeded, match=str(MAX_CONTEXT)):
        input_processor.process(PromptRequest(prompt=[5] * MAX_CONTEXT))
    for prompt in ([VOCAB], [-1], [True], []):
        with pytest.raises(InvalidRequest):
            input_processor.process(PromptRequest(prompt=prompt))
    for params in (SamplingParams(logit_bias={VOCAB: 1.0}), SamplingParams(allowed_token_ids=[-1])):
        with pytest.raises(InvalidRequest, match="not a token id"):
            input_processor.process(PromptRequest(prompt="hi", params=params))


def test_a_prompt_that_is_only_scored_may_fill_the_context() -> None:
    core, scored = scripted_core(), SamplingParams(max_tokens=0, prompt_logprobs=0)
    (outputs,) = run(core, [PromptRequest(prompt=[5] * MAX_CONTEXT, request_id="full", params=scored)]).values()
    assert outputs[-1].finish_reason == "length"
    assert [len(output.prompt_logprobs or ()) for output in outputs] == [MAX_CONTEXT - 1]
    with pytest.raises(ContextLengthExceeded):
        byte_input_processor().process(PromptRequest(prompt=[5] * (MAX_CONTEXT + 1), params=scored))


def test_a_request_that_never_fits_is_refused_and_the_others_run() -> None:
    core = scripted_core(num_blocks=20)
    huge = PromptRequest(prompt=[7] * 200, request_id="huge", params=SamplingParams(max_tokens=40))
    outputs = run(core, [huge, *GOOD])
    assert [output.finish_reason for output in outputs["huge"]] == ["error"]
    assert {name: tokens_of(outputs[name]) for name in expected()} == expected()


class FailingModel(ContextModel):
    """Raises in chosen steps, as a driver or an allocator might."""

    def __init__(self, failing_steps: set[int]) -> None:
        super().__init__(VOCAB)
        self.failing_steps = failing_steps
        self.num_steps = 0

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        self.num_steps += 1
        if self.num_steps in self.failing_steps:
            raise RuntimeError("out of memory")
        return super().forward(batch, storage)


@pytest.mark.failing_steps
def test_a_step_that_fails_once_hurts_nobody() -> None:
    core = scripted_core(FailingModel({2, 5}))
    assert {name: tokens_of(outputs) for name, outputs in run(core, GOOD).items()} == expected()
    assert core.stats().kv_blocks_used == 0
    assert core.stats().failed_steps == 2


class PoisonedModel(ContextModel):
    """Raises whenever a chosen token is fed, whoever is in the batch beside it."""

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        if POISON in batch.token_ids.tolist():
            raise RuntimeError("this token breaks the device")
        return super().forward(batch, storage)


@pytest.mark.failing_steps
@pytest.mark.parametrize("num_poisoned", [1, 2])
def test_a_request_that_makes_steps_fail_ends_alone(num_poisoned: int) -> None:
    core = scripted_core(PoisonedModel(VOCAB))
    names = [f"poisoned{number}" for number in range(num_poisoned)]
    poisoned = [PromptRequest(prompt=[7, POISON, 8], request_id=name) for name in names]
    outputs = run(core, [*GOOD[:1], *poisoned, *GOOD[1:]])
    for name in names:
        assert outputs[name][-1].error is not None and "breaks the device" in outputs[name][-1].error
    reference = {name: tokens for name, tokens in expected().items() if POISON not in tokens}
    assert len(reference) >= 3, "the script must leave something to compare"
    assert {name: tokens_of(outputs[name]) for name in reference} == reference
    assert core.stats().kv_blocks_used == 0


class SmallModel(ContextModel):
    """Can't compute two rows at a time."""

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        if len(batch.context_lens) > 1:
            raise RuntimeError("out of memory")
        return super().forward(batch, storage)


@pytest.mark.failing_steps
def test_requests_that_pass_alone_and_fail_together_are_not_tried_for_ever() -> None:
    core = scripted_core(SmallModel(VOCAB))
    outputs = run(core, GOOD)
    assert {one[-1].finish_reason for one in outputs.values()} == {"error"}


@pytest.mark.failing_steps
def test_a_step_that_fails_before_all_rows_are_taken_hurts_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Sampler.add_row

    def taken(sampler: Sampler, new: RowInit) -> None:
        if new.params.seed == 13:
            raise RuntimeError("a parameter that was not thought of")
        take(sampler, new)

    monkeypatch.setattr(Sampler, "add_row", taken)
    core = scripted_core()
    unlucky = PromptRequest(prompt=[7, 8], request_id="unlucky", params=SamplingParams(seed=13))
    first = run(core, [unlucky, *GOOD[:2]])
    assert first.pop("unlucky")[-1].finish_reason == "error"
    assert {name: tokens_of(outputs) for name, outputs in first.items()} == {
        name: tokens for name, tokens in expected().items() if name in first
    }
    assert {name: tokens_of(outputs) for name, outputs in run(core, GOOD).items()} == expected()


@pytest.mark.failing_steps
def test_an_engine_that_keeps_failing_gives_up() -> None:
    core = scripted_core(FailingModel(set(range(1, 100))))
    for _ in range(MAX_CONSECUTIVE_FAILURES - 1):
        run(core, GOOD[:1])
    with pytest.raises(RuntimeError, match="out of memory"):
        run(core, GOOD[:1])
