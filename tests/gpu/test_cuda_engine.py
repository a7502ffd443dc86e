"""Tiny models of every family on a real GPU: greedy tokens equal the reference's on the CPU, in float32."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

from tiny import FAMILIES, VOCAB, make_reference

from tokenmill import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
PROMPT_LENGTHS = (1, 5, 17, 40, 63, 9, 100)


def prompts(seed: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=rng).tolist() for length in PROMPT_LENGTHS]


def answers(folder: Path, device: str, params: SamplingParams, num_rows: int) -> list[list[int]]:
    llm = LLM(
        str(folder), device=device, backend="reference" if device == "cpu" else "triton", dtype="float32",
        max_context=200, max_running=num_rows, token_budget=48, num_blocks=200, threads=1,
    )  # fmt: skip
    found = llm.generate(prompts(1), params, progress=False)
    assert not [one.error for one in found if one.error]
    return [one.outputs[0].token_ids for one in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_the_reference(family: str, tmp_path: Path) -> None:
    """Seven rows in five seats: rows end, others take their place, chunks run beside decoding rows."""
    make_reference(family).save_pretrained(tmp_path)
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
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.1, seed=7, max_tokens=30)
    assert answers(tmp_path, "cuda", params, 4) == answers(tmp_path, "cpu", params, 7)


def test_answers_past_the_context_equal_the_reference(tmp_path: Path) -> None:
    """Rows that work ahead must not do so across a shift, nor into blocks that the shifted row no longer has."""
    make_reference("llama").save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=330, ignore_eos=True, context_shift=True)
    assert answers(tmp_path, "cuda", params, 5) == answers(tmp_path, "cpu", params, 7)
