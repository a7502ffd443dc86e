"""Costs against figures computed by hand and against published ones."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from tokenmill.arch.cost import (
    decode_flops,
    gguf_weight_bytes,
    kv_bytes,
    kv_bytes_per_token,
    num_active_parameters,
    num_parameters,
    num_visible_pairs,
    prefill_flops,
    weight_bytes,
    weight_parts,
)
from tokenmill.arch.gguf_file import read_gguf
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.arch.tensors import tensors_of


def spec_of(model_type: str, hidden: int, inter: int, layers: int, heads: int, vocab: int, **more: Any) -> ModelSpec:
    sizes = {"hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers, "vocab_size": vocab}
    return spec_from_hf({"model_type": model_type, "num_attention_heads": heads, **sizes, **more})


QWEN_32B = spec_of("qwen2", 5120, 27648, 64, 40, 152064, num_key_value_heads=8)
LLAMA_13B = spec_of("llama", 5120, 13824, 40, 40, 32000)


def test_published_prefill_and_decode_of_qwen2_5_32b() -> None:
    assert prefill_flops(QWEN_32B, 1024, num_logits=0, causal=False) / 1e12 == pytest.approx(65.28, abs=0.005)
    assert decode_flops(QWEN_32B, 2048) / 1e12 == pytest.approx(0.06, abs=0.007)
    assert num_parameters(QWEN_32B) == 32_763_876_352  # the checkpoint's own count


def test_published_kv_size_of_llama_13b() -> None:
    assert kv_bytes(LLAMA_13B, "float16", 2048) / 1e9 == pytest.approx(1.7, abs=0.03)
    assert kv_bytes_per_token(LLAMA_13B, "float16") == 2 * 40 * 5120 * 2  # "800 KB per token"
    assert num_parameters(LLAMA_13B) == 13_015_864_320


def test_flops_by_hand() -> None:
    spec = spec_of("llama", 8, 12, 2, 2, 10, num_key_value_heads=1)
    layer = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 12
    assert decode_flops(spec, 5) == 2 * (2 * layer + 4 * 8 * 5) + 2 * 8 * 10
    assert prefill_flops(spec, 3) == 2 * (3 * 2 * layer + 4 * 8 * (1 + 2 + 3)) + 2 * 8 * 10
    whole = prefill_flops(spec, 7, num_logits=7)
    assert whole == sum(decode_flops(spec, context) for context in range(1, 8))
    assert whole == prefill_flops(spec, 4, num_logits=4) + prefill_flops(spec, 3, start=4, num_logits=3)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 8, 20])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 9), (2, 4), (4, 1), (6, 7)])
def test_visible_pairs_are_those_of_the_mask(window: int | None, start: int, count: int) -> None:
    pairs = sum(
        1 for query in range(start, start + count) for key in range(query + 1) if window is None or query - key < window
    )
    assert num_visible_pairs(count, start, window) == pairs


def test_windows_bound_the_cache() -> None:
    spec = spec_of("gemma2", 64, 64, 4, 4, 100, head_dim=16, num_key_value_heads=2, sliding_window=100)
    per_layer = 2 * 2 * 16 * 2
    assert kv_bytes(spec, "bfloat16", 50) == 4 * 50 * per_layer
    assert kv_bytes(spec, "bfloat16", 1000) == (2 * 100 + 2 * 1000) * per_layer


def test_active_parameters_of_a_mixture() -> None:
    spec = spec_of("mixtral", 4096, 14336, 32, 32, 32000, num_key_value_heads=8)
    assert num_parameters(spec) / 1e9 == pytest.approx(46.7, abs=0.05)  # Mistral's own figures
    assert num_active_parameters(spec) / 1e9 == pytest.approx(12.9, abs=0.05)
    assert prefill_flops(spec, 1, num_logits=0) < 2 * num_active_parameters(spec)


def test_parameters_are_the_values_of_all_tensors(shared_dir: Path) -> None:
    """Embeddings of each layer's own and projections between streams too (Gemma 3n and 4)."""
    for name in ("gemma3n", "gemma4", "qwen3_next", "deepseek_v3", "nemotron_h"):
        spec = read_spec(shared_dir / "goldens" / "tiny" / name)
        assert num_parameters(spec) == sum(prod(tensor.shape) for tensor in tensors_of(spec).values()), name
        parts = weight_parts(spec, "bfloat16")
        assert parts.total == 2 * num_parameters(spec)
        tables = tensors_of(spec).get("layer_inputs.embed.weight")
        assert parts.tables == (2 * prod(tables.shape) if tables else 0)


def test_weight_bytes_by_type() -> None:
    spec = spec_of("llama", 256, 512, 1, 4, 1000)
    vectors = 3 * 256
    assert weight_bytes(spec, "bfloat16") == 2 * num_parameters(spec)
    expected = (num_parameters(spec) - vectors) * 144 // 256 + 4 * vectors
    assert weight_bytes(spec, "Q4_K", vector_dtype="float32") == expected


def test_gguf_bytes_are_the_file_s(smollm2_path: Path) -> None:
    total = gguf_weight_bytes(read_gguf(smollm2_path))
    assert 0 < smollm2_path.stat().st_size - total < 2_500_000  # the rest is vocabulary
