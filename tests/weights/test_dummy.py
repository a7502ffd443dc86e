"""Random weights: right shapes, the same for the same seed, sane in every format."""

from __future__ import annotations

import pytest
import torch

from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.packed_formats import StoredFormat, dummy_formats
from tokenmill.arch.tensors import tensors_of
from tokenmill.errors import UnsupportedModel
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.dummy import dummy_weights

SPEC = spec_from_hf(
    {
        "model_type": "qwen2",
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)


def test_every_tensor_of_the_spec() -> None:
    weights = dummy_weights(SPEC, seed=1, dtype=torch.bfloat16)
    weights.check()
    assert weights.names() == list(tensors_of(SPEC))
    for name, tensor in tensors_of(SPEC).items():
        raw = weights.get(name)
        assert raw.shape == tuple(raw.data.shape) == tensor.shape
        assert raw.data.dtype == (torch.float32 if tensor.kind == "vector" else torch.bfloat16)
    assert torch.equal(weights.get("final_norm.weight").data, torch.ones(256))
    assert weights.get("layers.0.q.weight").data.float().std().item() == pytest.approx(0.02, rel=0.02)


def test_the_seed_decides() -> None:
    first, same, other = (dummy_weights(SPEC, seed=seed) for seed in (1, 1, 2))
    name = "layers.1.up.weight"
    first.get("embed.weight")  # the order of reading does not matter
    assert torch.equal(first.get(name).data, same.get(name).data)
    assert not torch.equal(first.get(name).data, other.get(name).data)
    assert not torch.equal(first.get(name).data, first.get("layers.0.up.weight").data)


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_random_blocks_have_the_usual_deviation(quant: str) -> None:
    raw = dummy_weights(SPEC, quant=quant).get("embed.weight")
    values = dequantize(raw)
    assert raw.quant == quant and torch.isfinite(values).all()
    assert values.std().item() == pytest.approx(0.02, rel=0.1)
    assert abs(values.mean().item()) < 0.004


def test_blocks_where_a_checkpoint_would_have_them() -> None:
    stored = {
        "layers.0.up.weight": StoredFormat("MXFP4"),
        "layers.0.q.weight": StoredFormat("Q4_0", blocks_per_scale=4),
    }
    weights = dummy_weights(SPEC, stored=dummy_formats(stored))
    assert [weights.get(f"layers.0.{part}.weight").quant for part in ("up", "gate", "q")] == ["MXFP4", None, None]


def test_rows_that_no_block_fits_stay_plain() -> None:
    spec = spec_from_hf(
        {
            "model_type": "llama",
            "vocab_size": 10,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
        }
    )
    weights = dummy_weights(spec, quant="Q4_K")
    assert weights.get("layers.0.q.weight").quant is None
    assert weights.get("layers.0.down.weight").quant == "Q4_K"


def test_unknown_format_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="IQ2_XXS"):
        dummy_weights(SPEC, quant="IQ2_XXS")
