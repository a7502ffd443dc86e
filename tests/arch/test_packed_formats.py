"""Formats in which a GPU stores a checkpoint's quantised matrices, and their bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.packed_formats import PackedIntFormat, StoredFormat, packed_int_format, stored_formats, widened
from tokenmill.arch.tensors import tensors_of
from tokenmill.planner.device import plan_device
from tokenmill.planner.model import model_at
from tokenmill.planner.plan import Question, make_plan
from tokenmill.runner.memory import gpu_weight_parts

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024,
    "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
MATRICES = 2 * (1024 * 1024 * 2 + 2 * 256 * 1024 + 3 * 1024 * 2048)
PLACES = 4 * 2 * (6 * 1024 + 2048) / MATRICES  # of columns in act order, of seven matrices of a layer


@pytest.mark.parametrize(
    ("quant", "blocks_per_scale", "columns", "form"),
    [
        ("Q4_0", 1, 4096, PackedIntFormat(4, 32, has_minima=False, span=32)),
        ("Q4_K", 1, 4096, PackedIntFormat(4, 32, has_minima=True, span=32)),
        ("Q4_1", 4, 4096, PackedIntFormat(4, 128, has_minima=True, span=32)),  # AWQ's groups of 128 stay whole
        ("Q4_1", 128, 4096, PackedIntFormat(4, 128, has_minima=True, span=32)),  # one group a row: in groups of 128
        ("Q4_1", 6, 384, PackedIntFormat(4, 64, has_minima=True, span=16)),
        (
            "Q4_1",
            1,
            576,
            PackedIntFormat(8, 32, has_minima=True, span=16),
        ),  # SmolLM2's rows are no whole spans of 4 bits
        ("Q6_K", 1, 4096, PackedIntFormat(8, 16, has_minima=False, span=32)),
        ("Q8_0", 1, 4096, PackedIntFormat(8, 32, has_minima=False, span=32)),
        ("Q8_0", 1, 32, None),
        ("Q2_K", 1, 4096, None),
        ("F8", 4, 4096, PackedIntFormat(8, 128, has_minima=False, span=0, is_fp8=True)),  # blocks of 128 columns
        ("F8", 1, 4096, None),  # mxfp8
    ],
)
def test_the_form_of_a_matrix(quant: str, blocks_per_scale: int, columns: int, form: PackedIntFormat | None) -> None:
    assert packed_int_format("layers.0.q.weight", (64, columns), StoredFormat(quant, blocks_per_scale)) == form
    assert packed_int_format("layers.0.router.weight", (64, columns), StoredFormat(quant, blocks_per_scale)) is None
    of_experts = packed_int_format(
        "layers.0.experts.up.weight", (8, 64, columns), StoredFormat(quant, blocks_per_scale)
    )
    assert of_experts == (form and replace(form, is_of_experts=True))


def test_fp8_of_one_scale_a_row_is_kept() -> None:
    kept = PackedIntFormat(8, 512, has_minima=False, span=0, is_fp8=True)
    assert packed_int_format("layers.0.q.weight", (64, 512), StoredFormat("F8", 16)) == kept
    assert kept.num_bytes((64, 512)) == 64 * 512 + 64 * 4
    assert packed_int_format("head.weight", (64, 512), StoredFormat("F8", 16)) is None


def test_small_floats_stay_as_they_are() -> None:
    """fp8 with a scale for 128 columns, experts too, and NVFP4 and MXFP4 in 4 bits"""
    experts = "layers.0.experts.up.weight"
    for name, shape, blocks_per_scale in (
        ("a.weight", (64, 512), 4),
        (experts, (8, 64, 512), 4),
        (experts, (8, 64, 512), 16),
    ):
        kept = packed_int_format(name, shape, StoredFormat("F8", blocks_per_scale))
        assert kept is not None and kept.is_fp8 and kept.group == 128
        assert kept.num_bytes(shape) == prod(shape) * (1 + 4 / 128)
    assert packed_int_format("a.weight", (64, 512), StoredFormat("F8", 1)) is None, "mxfp8: a scale for 32 columns"
    for quant, scales, beside in (("NV4", 1 / 16, 64 * 4), ("NV4D", 1 / 16, 64 * 4), ("MXFP4", 1 / 32, 0)):
        kept = packed_int_format("a.weight", (64, 512), StoredFormat(quant))
        assert kept is not None and kept.is_fp4 and kept.num_bytes((64, 512)) == 64 * 512 * (0.5 + scales) + beside
        looked_up = packed_int_format("embed.weight", (64, 512), StoredFormat(quant))
        assert looked_up is not None and not looked_up.is_fp4


@pytest.mark.parametrize(("quant", "group"), [("NV4", 16), ("NV4D", 16), ("MXFP4", 32)])
def test_small_floats_become_integers_where_expanding_them_is_slow(quant: str, group: int) -> None:
    """Experts do not: they have kernels of their own on every GPU."""
    stored = widened(
        {"a.weight": StoredFormat(quant), "b.weight": StoredFormat("Q4_K"), "c.weight": StoredFormat("F8", 4)}
    )
    kept = packed_int_format("a.weight", (64, 512), stored["a.weight"])
    assert kept == PackedIntFormat(8, group, has_minima=False, span=32)
    assert kept.num_bytes((64, 512)) == 64 * 512 * (1 + 2 / group)
    experts = packed_int_format("layers.0.experts.up.weight", (8, 64, 512), stored["a.weight"])
    assert experts is not None and experts.is_fp4
    assert stored["b.weight"] == StoredFormat("Q4_K") and stored["c.weight"] == StoredFormat("F8", 4)


@pytest.mark.parametrize(
    ("config", "bytes_each"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 0.5 + 4 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}, 0.5 + 2 / 64),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False}, 0.5 + 4 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": True}, 0.5 + 2 / 64 + PLACES),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 0.5 + 4 / 64),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 128),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 1 + 4 * 15360 / MATRICES),  # a scale a row
    ],
)
def test_grouped_checkpoints_are_planned_as_they_are_kept(
    config: dict[str, Any], bytes_each: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": config}))
    spec = spec_from_hf(LLAMA)
    parts = gpu_weight_parts(spec, 2, stored=stored_formats(tmp_path, spec))
    vectors = 5 * 1024 * 4
    assert parts.embedding == 32000 * 1024 * 2
    assert parts.rest == round(MATRICES * bytes_each) + vectors + 32000 * 1024 * 2
    planned = make_plan(model_at(tmp_path, "a"), plan_device("H200"), Question(dtype="bfloat16")).memory
    if bytes_each < 2:
        assert planned.weights == parts.total


@pytest.mark.parametrize(
    ("quantization", "stored", "bytes_each"),
    [
        ("none", "Q4_K", 0.5 + 4 / 32),
        ("none", "Q8_0", 1 + 2 / 32),
        ("none", None, 2),
        ("int4", None, 0.5 + 2 / 128),
        ("int8", None, 1 + 2 / 32),
        ("fp8", None, 1 + 2 / 32),  # no products with fp8 experts
    ],
)
def test_experts_are_planned_as_they_are_kept(quantization: str, stored: str | None, bytes_each: float) -> None:
    experts = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    spec = spec_from_hf(LLAMA | experts | {"num_experts_per_tok": 2})
    formats = {name: StoredFormat(stored) for name in tensors_of(spec) if ".experts." in name} if stored else {}
    parts = gpu_weight_parts(spec, 2, quantization, formats)
    assert parts.experts == 2 * 4 * 3 * 1024 * 2048 * bytes_each


def test_a_gguf_file_is_planned_as_it_is_kept(smollm2_path: Path) -> None:
    """Q4_1 matrices of 576 columns take 8 bits; the head is the embedding, in the same format."""
    model = model_at(smollm2_path, "smollm2")
    assert model.kept is not None and model.stored is not None and model.expands_weights
    plans = [make_plan(model, plan_device("H200"), Question(dtype=dtype)) for dtype in ("bfloat16", "auto", "float32")]
    in_half, by_itself, in_full = (plan.memory for plan in plans)
    assert in_half.weights == model.kept.total
    assert by_itself == in_full and plans[1].weight_dtype == plans[1].kv_dtype == "float32", "so small a model"
    assert in_full.weights == 4 * 134_515_008 and in_full.kv_per_request == 2 * in_half.kv_per_request
    assert model.stored.total < model.kept.total < 0.6 * 2 * 134_515_008
    assert make_plan(model, plan_device("Xeon 8380"), Question()).memory.weights == model.stored.total
