"""GGUF files of models with latent attention, recurrent layers and Gemma 4's layers, as llama.cpp's converter writes
them. Read back they are the checkpoint's model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.gguf_converted import Config, write_converted
from tests.support.gguf_logits import expect_logits
from tests.support.native_models import native_model
from tests.support.paged_run import PagedRun, feed_in_chunks
from tests.support.tiny_models import LATENT, VOCAB, YARN_ROPE, load_ours, make_reference
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.models.decoder import Decoder
from tokenmill.ops.cpu import is_available
from tokenmill.weights.source import open_weights

EPS = {"rms_norm_eps": 2.0**-20}  # exact in float32, which is what GGUF stores
YARN = {"rope_parameters": {**YARN_ROPE, "mscale": 0.5, "mscale_all_dim": 0.5}}  # files say one number for both
GRANITE = {
    **EPS, "position_embedding_type": "nope", "mamba_proj_bias": False, "time_step_limit": [0.0, float("inf")],
    "embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.25, "attention_multiplier": 0.125,
}  # fmt: skip
DELTA = {
    **EPS, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mlp_only_layers": [],
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
NEMOTRON = {"layer_norm_epsilon": 2.0**-20, "routed_scaling_factor": 1.5}
PURE = {"layer_norm_epsilon": 2.0**-20, "max_position_embeddings": 2**20}
BLOCKS = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
# name: (architecture, family, sizes in place of the tiny model's own)
MODELS: dict[str, tuple[str, str, Config]] = {
    "deepseek_v2": ("deepseek2", "deepseek_v2", {**EPS, **YARN}),
    "deepseek_v3": ("deepseek2", "deepseek_v3", {**EPS, **YARN}),
    "glm4_moe_lite": ("deepseek2", "glm4_moe_lite", {**EPS, "n_group": 1, "topk_group": 1}),
    "kimi_linear": ("kimi-linear", "kimi_linear", {**EPS, "linear_head_dim": 16, "routed_scaling_factor": 1.5}),
    "qwen2_moe": ("qwen2moe", "qwen2_moe", EPS),
    "qwen3_next": ("qwen3next", "qwen3_next", DELTA),
    "qwen3_5": ("qwen35", "qwen3_5", DELTA),
    "qwen3_5_moe": ("qwen35moe", "qwen3_5_moe", DELTA),
    "granite_hybrid": ("granitehybrid", "granitemoehybrid", GRANITE),
    "granite_hybrid_dense": ("granitehybrid", "granitemoehybrid_dense", GRANITE),
    "falcon_h1": ("falcon-h1", "falcon_h1", EPS),
    "nemotron_h": ("nemotron_h", "nemotron_h", {**NEMOTRON, "layers_block_type": BLOCKS, "moe_latent_size": None}),
    "nemotron_h_moe": (
        "nemotron_h_moe", "nemotron_h",
        {**NEMOTRON, "layers_block_type": [{"mlp": "moe"}.get(kind, kind) for kind in BLOCKS]},
    ),
    "jamba": ("jamba", "jamba", {**EPS, "mamba_proj_bias": False}),
    "jamba_dense": ("jamba", "jamba_dense", EPS),
    "mamba": ("mamba", "mamba", {**PURE, "use_bias": False}),
    "falcon_mamba": ("mamba", "falcon_mamba", PURE),
    "mamba2": ("mamba2", "mamba2", PURE),
    "ministral3": (
        "mistral3", "ministral3",
        {**EPS, "rope_parameters": {**YARN_ROPE, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.25,
         "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "cohere2": (
        "cohere2", "cohere2",
        {"layer_norm_eps": 2.0**-20, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "ernie4_5": ("ernie4_5", "ernie4_5", EPS),
    "starcoder2": ("starcoder2", "starcoder2", {"norm_epsilon": 2.0**-20, "sliding_window": None}),
    "qwen2_vl": ("qwen2vl", "qwen2", EPS),
    "qwen3_vl": ("qwen3vl", "qwen3", EPS),
    "qwen3_vl_moe": ("qwen3vlmoe", "qwen3_moe", EPS),
    "mimo_v2": (
        "mimo2", "mimo_v2_flash",
        {**EPS, "n_group": 1, "topk_group": 1, "routed_scaling_factor": None, "attention_value_scale": 0.75},
    ),
    "gemma4": ("gemma4", "gemma4", EPS),
    "gemma4_moe": ("gemma4", "gemma4_moe", EPS),
    "gemma3n": ("gemma3n", "gemma3n", {**EPS, "vocab_size_per_layer_input": VOCAB}),
    "glm_moe_dsa": ("glm-dsa", "glm_moe_dsa", EPS),
    "llama4": (
        "llama4", "llama4",
        {**EPS, "attention_chunk_size": 8192, "floor_scale": 8192, "no_rope_layer_interval": 4},
    ),
}  # fmt: skip
OTHER_SPEC = ("falcon_h1", "glm4_moe_lite", "qwen3_5", "qwen3_5_moe")
"""Multipliers are in the matrices; the file does not say which of two equal families it is; value heads lie in turns"""


def converted(name: str, folder: Path) -> tuple[Decoder, Any, Path]:
    """(the checkpoint's model, transformers' own, the file)"""
    arch, family, sizes = MODELS[name]
    theirs = make_reference(family, **sizes)
    checkpoint = load_ours(theirs, folder)
    config: Config = json.loads((folder / "config.json").read_text())
    write_converted(folder / "model.gguf", arch, config, load_file(folder / "model.safetensors"))
    return checkpoint, theirs, folder / "model.gguf"


def comparable(spec: ModelSpec) -> ModelSpec:
    """A spec without what only one of the two kinds of files says."""
    return replace(spec, name="", dtype="", bos_token_id=None, eos_token_ids=(), num_extra_layers=0)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_checkpoint_s_model(name: str, tmp_path: Path) -> None:
    checkpoint, theirs, path = converted(name, tmp_path)
    spec = read_spec(path)
    assert (comparable(spec) == comparable(checkpoint.spec)) != (name in OTHER_SPEC)
    expect_logits(path, spec, theirs)


@pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3", "gemma3n", "glm_moe_dsa"])
def test_native_kernels_compute_the_file(name: str, tmp_path: Path) -> None:
    """Value heads in turns, and matrices of each head put together."""
    checkpoint, _, path = converted(name, tmp_path)
    spec = read_spec(path)
    native = native_model(spec, open_weights(path, spec), max_context=spec.max_context)
    tokens = torch.randint(3, VOCAB, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    expected, found = (feed_in_chunks(PagedRun(one, 1, 80, 16), 0, tokens, 37) for one in (checkpoint, native))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_older_files_have_the_matrices_of_all_heads_in_one(tmp_path: Path) -> None:
    """Older files also store the sizes of heads under the keys of attention."""
    checkpoint, _, _ = converted("deepseek_v2", tmp_path)
    config: Config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    assert LATENT["kv_lora_rank"] == config["kv_lora_rank"]
    write_converted(tmp_path / "old.gguf", "deepseek2", config, tensors, is_old=True)
    spec = read_spec(tmp_path / "old.gguf")
    weights = open_weights(tmp_path / "old.gguf", spec)
    weights.check()
    assert spec.layers == checkpoint.spec.layers
    expected = tensors["model.layers.1.self_attn.kv_b_proj.weight"]
    assert torch.equal(weights.get("layers.1.kv_up.weight").data, expected)
