"""Tiny models of every family on a real GPU: greedy tokens equal the reference's on the CPU, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_models import FAMILIES, VOCAB, make_reference
from tokenmill import LLM, SamplingParams
from tokenmill.arch.read import read_spec
from tokenmill.ops.compute_request import ComputeRequest
from tokenmill.ops.triton import unsupported_reason
from tokenmill.params import Guided
from tokenmill.runner.cuda_runner import CudaRunner
from tokenmill.types import PENDING, StepPlan, StepResult

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
PROMPT_LENGTHS = (1, 5, 17, 40, 63, 9, 100)


def prompts(seed: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=rng).tolist() for length in PROMPT_LENGTHS]


def opened(folder: Path, device: str, num_rows: int, num_blocks: int = 200) -> LLM:
    return LLM(
        str(folder), device=device, backend="reference" if device == "cpu" else "triton", dtype="float32",
        max_context=200, max_running=num_rows, token_budget=48, num_blocks=num_blocks, threads=1,
    )  # fmt: skip


def answers(folder: Path, device: str, params: SamplingParams | list[SamplingParams], num_rows: int) -> list[list[int]]:
    found = opened(folder, device, num_rows).generate(prompts(1), params, progress=False)
    assert not [one.error for one in found if one.error]
    return [one.outputs[0].token_ids for one in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_the_reference(family: str, tmp_path: Path) -> None:
    """Seven rows in five seats: rows end, others take their place, chunks run beside decoding rows."""
    make_reference(family).save_pretrained(tmp_path)
    reason = unsupported_reason(ComputeRequest(read_spec(tmp_path), "cuda", "float32", "float32"))
    if reason:
        pytest.skip(f"not computed by the GPU's kernels yet: {reason}")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    assert answers(tmp_path, "cuda", params, 5) == answers(tmp_path, "cpu", params, 7)


def test_stop_tokens_end_a_row_that_was_computed_ahead(tmp_path: Path) -> None:
    make_reference("llama").save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=list(range(3, 40)))
    expected = answers(tmp_path, "cpu", params, 7)
    assert len({len(one) for one in expected}) > 1, "the rows must end at different times"
    assert answers(tmp_path, "cuda", params, 3) == expected


def test_drawn_tokens_equal_the_reference(tmp_path: Path) -> None:
    make_reference("qwen3").save_pretrained(tmp_path)
    params: list[dict[str, Any]] = [
        {"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1},
        {"min_p": 0.02, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"logit_bias": {5: 3.0, 9: -4.0}, "banned_token_ids": [7, 8], "min_tokens": 10},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"typical_p": 0.8},  # drawn by the host
        {"logprobs": 2, "top_p": 0.7},  # likewise
        {"temperature": 0.0},
    ]
    params = [SamplingParams(**{"temperature": 0.8, "seed": 7, "max_tokens": 30, **one}) for one in params]
    assert answers(tmp_path, "cuda", params, 4) == answers(tmp_path, "cpu", params, 7)


def test_answers_past_the_context_equal_the_reference(tmp_path: Path) -> None:
    """Rows that work ahead must not do so across a shift, nor into blocks that the shifted row no longer has."""
    make_reference("llama").save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=330, ignore_eos=True, context_shift=True)
    assert answers(tmp_path, "cuda", params, 5) == answers(tmp_path, "cpu", params, 7)


def test_rows_that_gave_way_return_to_their_answers(tmp_path: Path) -> None:
    """With other blocks, and often in another seat"""
    make_reference("llama").save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    llm = opened(tmp_path, "cuda", 6, num_blocks=26)
    found = [one.outputs[0].token_ids for one in llm.generate(prompts(1), params, progress=False)]
    assert llm.core.stats().preemptions, "there must be too few blocks"
    assert found == answers(tmp_path, "cpu", params, 7)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guided_rows_equal_the_reference(stories_dir: Path, temperature: float) -> None:
    """Beside rows that follow nothing."""
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 200}, "ok": {"type": "boolean"}},
        "required": ["age", "ok"],
        "additionalProperties": False,
    }
    forms = [Guided.schema(schema), Guided("regex", r"(Lily|Tim) is [0-9]{2} years old\."), None]
    params = [SamplingParams(temperature=temperature, max_tokens=100, seed=3, guided=form) for form in forms * 3]
    texts = ["Once upon a time", "There was a cat who", "One day"] * 3
    found = {}
    for device in ("cuda", "cpu"):
        outputs = opened(stories_dir, device, 5).generate(texts, params, progress=False)
        assert not [one.error for one in outputs if one.error]
        found[device] = [one.outputs[0].text for one in outputs]
    assert found["cuda"] == found["cpu"]
    for text in found["cuda"][0::3]:
        json.loads(text)
    assert all(text.endswith(" years old.") for text in found["cuda"][1::3])


def test_prompts_are_started_before_the_step_ahead_of_them_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_reference("llama").save_pretrained(tmp_path)
    in_flight, started = 0, set[int]()
    launch, collect = CudaRunner.launch, CudaRunner.collect

    def watched_launch(self: CudaRunner, plan: StepPlan) -> int:
        nonlocal in_flight
        if in_flight:
            started.update(row.start for row in plan.rows if len(row.token_ids) > 1)
        in_flight += 1
        return launch(self, plan)

    def watched_collect(self: CudaRunner, ticket: int) -> StepResult:
        nonlocal in_flight
        in_flight -= 1
        return collect(self, ticket)

    monkeypatch.setattr(CudaRunner, "launch", watched_launch)
    monkeypatch.setattr(CudaRunner, "collect", watched_collect)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    found = answers(tmp_path, "cuda", params, 4)
    assert 0 in started and any(started), "newcomers, and the rest of prompts"
    assert found == answers(tmp_path, "cpu", params, 7)


def test_decoding_steps_feed_tokens_that_the_host_has_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once prompts are computed, every step but the first is launched behind one that is not collected."""
    make_reference("llama").save_pretrained(tmp_path)
    fed: list[bool] = []
    launch = CudaRunner.launch

    def watched(self: CudaRunner, plan: StepPlan) -> int:
        fed.extend(row.token_ids == [PENDING] for row in plan.rows if len(row.token_ids) == 1)
        return launch(self, plan)

    monkeypatch.setattr(CudaRunner, "launch", watched)
    answers(tmp_path, "cuda", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), 7)
    assert sum(fed) > 0.9 * len(fed)
