"""Whole models in other makers' formats: experts, latent attention and mixtures; the reference gives the bits of the
plain twin with the same numbers, native kernels answers close to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.support.quantised_models import WRITERS, fp8_blocks, write_quantised_twins
from tokenmill import LLM, SamplingParams
from tokenmill.arch.read import read_spec
from tokenmill.ops.cpu import is_available
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.source import open_weights

FINE: dict[str, dict[str, Any]] = {"reference": {}, "cpu": {"activation_bits": "16"}}
PROMPT = [1, 403, 407, 261, 378]


def greedy(folder: Path, backend: str) -> tuple[list[int], list[float]]:
    """With all bits of activations, so that only weights are compared"""
    llm = LLM(
        str(folder),
        device="cpu",
        backend=backend,
        dtype="float32",
        threads=1,
        kv_dtype="float32",
        max_context=64,
        **FINE[backend],
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    output = llm.generate([PROMPT], params, progress=False)[0].outputs[0]
    assert output.logprobs is not None
    return output.token_ids, [one.logprob for one in output.logprobs]


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("fp8 blocks", "deepseek_v3"),
        ("fp8 channels", "qwen3_5"),
        ("w4a16", "qwen3_moe"),
        ("w8a8", "qwen3_moe"),
        ("nvfp4", "qwen3_moe"),
        ("nf4", "smollm3"),
        ("gptq act order", "smollm3"),
        ("hqq rows", "smollm3"),
        ("mixed", "qwen3_moe"),
    ],
)
def test_answers_are_those_of_the_plain_twin(kind: str, model: str, shared_dir: Path, tmp_path: Path) -> None:
    packed, plain = write_quantised_twins(shared_dir / "goldens" / "tiny" / model, tmp_path, kind)
    found, expected = (open_weights(folder, read_spec(folder)) for folder in (packed, plain))
    found.check()
    for name in expected.names():
        one = found.get(name)
        assert torch.equal(dequantize(one), dequantize(expected.get(name)).reshape(one.shape)), name
    tokens, logprobs = greedy(plain, "reference")
    assert greedy(packed, "reference") == (tokens, logprobs)
    if is_available()[0]:
        near, close = greedy(packed, "cpu")
        same = next((i for i, (a, b) in enumerate(zip(near, tokens, strict=True)) if a != b), len(tokens))
        assert same >= 6 and close[:same] == pytest.approx(logprobs[:same], abs=0.01)


def test_fp8_blocks_have_the_values_of_transformers() -> None:
    """Whole blocks, as its dequantise takes them"""
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    parts, values = fp8_blocks(weight)
    theirs = Fp8Dequantize(None)._dequantize_one(parts[".weight"], parts[".weight_scale_inv"], torch.float32)
    assert torch.equal(theirs, values)


@pytest.mark.parametrize("kind", WRITERS)
def test_written_formats_are_close_to_what_they_round(kind: str) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    _, values = WRITERS[kind](weight)
    assert float((values - weight).norm() / weight.norm()) < 0.15
