"""The default model with everything at its default answers a plain question correctly, and plain weights may be
rounded to int8 as they are loaded. Small models are the first to show what rounding takes away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.ops.cpu import is_available

needs_kernels = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])


@needs_kernels
def test_the_capital_of_france(smollm2_path: Path) -> None:
    llm = LLM(str(smollm2_path), threads=1, max_context=256)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [answer] = llm.chat([question], SamplingParams(temperature=0.0, max_tokens=12))
    assert answer.outputs[0].text == "The capital of France is Paris."


@needs_kernels
def test_int8_weights_follow_the_plain_ones(stories_dir: Path) -> None:
    """Other numbers, the same story: rounding is felt in the logprobs and not yet in the first words."""
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
    plain, rounded = (
        LLM(str(stories_dir), threads=1, quantization=kind).generate(["Once upon a time"], params)[0].outputs[0]
        for kind in ("none", "int8")
    )
    assert rounded.token_ids == plain.token_ids
    assert rounded.logprobs != plain.logprobs
