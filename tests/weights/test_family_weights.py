"""A tiny random model of every family, written by transformers, read by us: spec, parameter count, every tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tokenmill.arch.cost import num_parameters
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import LongRopeScaling, MlpSpec, MoeSpec
from tokenmill.arch.tensors import tensors_of
from tokenmill.errors import DamagedFile, ModelError
from tokenmill.weights.source import open_weights

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "rope_theta": 10000.0}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "head_dim": 32,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 24},
    "gemma3_text": {"head_dim": 32, "sliding_window": 16},
    "phi3": {
        "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        "original_max_position_embeddings": 32,
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    return {kind: _save(kind, tmp_path_factory.mktemp(kind)) for kind in TINY}


def _save(kind: str, directory: Path) -> tuple[Path, Any]:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **TINY[kind]})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases start as ones and zeros, which would hide mistakes
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(directory)
    return directory, model


@pytest.mark.parametrize("kind", TINY)
def test_every_tensor_loads_in_its_shape(saved: dict[str, tuple[Path, Any]], kind: str) -> None:
    directory, _ = saved[kind]
    spec = read_spec(directory)
    weights = open_weights(directory, spec)
    weights.check()
    tensors = tensors_of(spec)
    assert weights.names() == list(tensors)
    for name, tensor in tensors.items():
        raw = weights.get(name)
        assert (raw.name, raw.shape, tuple(raw.data.shape)) == (name, tensor.shape, tensor.shape)
        assert torch.isfinite(raw.data).all()


@pytest.mark.parametrize("kind", TINY)
def test_parameters_are_counted_as_transformers_counts(saved: dict[str, tuple[Path, Any]], kind: str) -> None:
    directory, model = saved[kind]
    assert num_parameters(read_spec(directory)) == model.num_parameters()


def test_values_are_the_model_s_own(saved: dict[str, tuple[Path, Any]]) -> None:
    for kind in ("llama", "qwen3", "gemma2"):
        directory, model = saved[kind]
        weights, state = open_weights(directory, read_spec(directory)), model.state_dict()
        assert torch.equal(weights.get("layers.1.q.weight").data, state["model.layers.1.self_attn.q_proj.weight"])
        assert torch.equal(weights.get("layers.3.down.weight").data, state["model.layers.3.mlp.down_proj.weight"])
        assert torch.equal(weights.get("embed.weight").data, state["model.embed_tokens.weight"])


def test_gemma_norms_become_plain_multipliers(saved: dict[str, tuple[Path, Any]]) -> None:
    directory, model = saved["gemma3_text"]
    weights, state = open_weights(directory, read_spec(directory)), model.state_dict()
    for ours, theirs in (
        ("layers.0.attn_norm", "model.layers.0.input_layernorm"),
        ("layers.0.attn_post_norm", "model.layers.0.post_attention_layernorm"),
        ("layers.0.mlp_norm", "model.layers.0.pre_feedforward_layernorm"),
        ("layers.0.q_norm", "model.layers.0.self_attn.q_norm"),
        ("final_norm", "model.norm"),
    ):
        assert torch.equal(weights.get(ours + ".weight").data, state[theirs + ".weight"] + 1)


def test_fused_rows_are_split(saved: dict[str, tuple[Path, Any]]) -> None:
    directory, model = saved["phi3"]
    weights, state = open_weights(directory, read_spec(directory)), model.state_dict()
    qkv = torch.cat([weights.get(f"layers.2.{part}.weight").data for part in "qkv"])
    assert torch.equal(qkv, state["model.layers.2.self_attn.qkv_proj.weight"])
    gate_up = torch.cat([weights.get(f"layers.2.{part}.weight").data for part in ("gate", "up")])
    assert torch.equal(gate_up, state["model.layers.2.mlp.gate_up_proj.weight"])


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_are_stacked(saved: dict[str, tuple[Path, Any]], kind: str) -> None:
    directory, model = saved[kind]
    weights = open_weights(directory, read_spec(directory))
    experts = model.model.layers[2].mlp.experts  # gate_up_proj: [experts, 2 * inter, hidden]
    gate_up = torch.cat([weights.get(f"layers.2.experts.{part}.weight").data for part in ("gate", "up")], dim=1)
    assert torch.equal(gate_up, experts.gate_up_proj.data)
    assert torch.equal(weights.get("layers.2.experts.down.weight").data, experts.down_proj.data)


def test_specs_say_what_the_configs_say(saved: dict[str, tuple[Path, Any]]) -> None:
    specs = {kind: read_spec(directory) for kind, (directory, _) in saved.items()}
    windows = {kind: [layer.mixer.window for layer in spec.layers] for kind, spec in specs.items()}
    assert windows["mistral"] == [16] * 4
    assert windows["qwen2"] == [None, None, 16, 16]
    assert windows["gemma2"] == [16, None, 16, None]
    assert windows["gemma3_text"] == [16, 16, 16, 16]
    assert [isinstance(layer.mlp, MoeSpec) for layer in specs["qwen3_moe"].layers] == [True, False, True, True]
    assert specs["qwen3_moe"].layers[1].mlp == MlpSpec(48)
    assert specs["gemma2"].layers[0].mixer.scale == 24**-0.5
    assert (specs["gemma2"].layers[0].mixer.softcap, specs["gemma2"].logit_softcap) == (50.0, 30.0)
    assert specs["gemma2"].embedding_scale == 8.0
    assert specs["llama"].layers[0].mixer.out_bias
    assert specs["qwen2"].layers[0].mixer.qkv_bias and not specs["qwen2"].layers[0].mixer.out_bias
    rope = specs["phi3"].layers[0].mixer.rope
    assert rope is not None and rope.rotary_dim == 12
    assert isinstance(rope.scaling, LongRopeScaling) and rope.scaling.original_context == 32


def test_gemma3_inside_a_picture_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = {**SMALL, **TINY["gemma3_text"]}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    assert (spec.family, spec.num_layers) == ("gemma3", 4)
    weights = open_weights(tmp_path, spec)
    weights.check()
    assert weights.get("layers.3.q.weight").shape == (128, 64)


def test_shards_are_read_as_one(saved: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    _, model = saved["llama"]
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    weights = open_weights(tmp_path, read_spec(tmp_path))
    weights.check()
    assert torch.equal(weights.get("head.weight").data, model.lm_head.weight.data)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(ModelError, match="shards are missing: model-00002"):
        open_weights(tmp_path, read_spec(tmp_path))


def test_check_names_every_wrong_tensor(saved: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory, _ = saved["llama"]
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(63)
    tensors["model.layers.0.surprise.weight"] = torch.ones(1)
    weights_file = tmp_path / "model.safetensors"
    save_file(tensors, weights_file)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    weights = open_weights(tmp_path, read_spec(tmp_path))
    with pytest.raises(DamagedFile) as caught:
        weights.check()
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "model.norm.weight [63] (expected [64])" in message
    assert "unexpected: model.layers.0.surprise.weight" in message
    with pytest.raises(DamagedFile, match="up_proj"):
        weights.get("layers.1.up.weight")
    save_file({"model.layers.0.self_attn.q_proj.qweight": torch.ones(8, 8, dtype=torch.int32)}, weights_file)
    with pytest.raises(DamagedFile, match="no quantization_config"):
        open_weights(tmp_path, read_spec(tmp_path))


def test_generation_config_adds_its_stop_tokens(saved: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    directory, _ = saved["llama"]
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert read_spec(tmp_path).eos_token_ids == (2, 7)
