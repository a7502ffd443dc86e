"""What native kernels cost on a real model in every maker's format: SmolLM2, rounded into each, reads a text with the
torch reference, which expands every matrix, and with the native kernels; perplexities differ by half a percent at
most."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.quantised_models import CONFIGS, WRITERS
from tokenmill import LLM, SamplingParams
from tokenmill.arch.families import BY_NAME
from tokenmill.arch.read import read_spec
from tokenmill.arch.tensors import sources_of
from tokenmill.ops.cpu import is_available
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.source import open_weights

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_available()[0], reason=is_available()[1])]

NUM_TOKENS = 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> dict[str, torch.Tensor]:
    """The model's matrices, expanded, under the names of a checkpoint"""
    spec = read_spec(smollm2_path)
    weights, names = open_weights(smollm2_path, spec), sources_of(spec, BY_NAME["llama"].hf_rules)
    return {names[ours].names[0]: dequantize(weights.get(ours)) for ours in weights.names()}


@pytest.fixture(scope="module")
def tokens(smollm2_path: Path, shared_dir: Path) -> list[int]:
    tokenizer = LLM(str(smollm2_path), device="cpu", max_context=64, num_blocks=16).frontend.tokenizer
    assert tokenizer is not None
    return tokenizer.encode((shared_dir / "traces" / "sonnet.txt").read_text())[:NUM_TOKENS]


def perplexity(folder: Path, backend: str, tokens: list[int]) -> float:
    llm = LLM(str(folder), device="cpu", backend=backend, max_context=NUM_TOKENS + 16, threads=2, packed_cache=False)
    (answer,) = llm.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=0), progress=False)
    logprobs = [one.logprob for one in answer.prompt_logprobs or [] if one is not None]
    assert len(logprobs) == len(tokens) - 1
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.parametrize("kind", WRITERS)
def test_kernels_read_a_text_as_well_as_the_reference(
    kind: str, plain: dict[str, torch.Tensor], tokens: list[int], tmp_path: Path
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in plain.items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.bfloat16()
            continue
        stem = name.removesuffix(".weight")
        tensors |= {stem + ending: part.contiguous() for ending, part in WRITERS[kind](weight)[0].items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": CONFIGS[kind]}))
    reference, native = (perplexity(tmp_path, backend, tokens) for backend in ("reference", "cpu"))
    print(f"{kind}: reference {reference:.4f}, native {native:.4f}, {100 * (native / reference - 1):+.3f} %")
    assert native == pytest.approx(reference, rel=0.005)
