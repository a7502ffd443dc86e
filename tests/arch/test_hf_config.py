"""Real configurations are read or refused by name; odd values are never guessed around."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.arch.cost import num_parameters
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import LinearScaling, Llama3Scaling, LongRopeScaling, Mla, ModelSpec, RopeSpec, YarnScaling
from tokenmill.errors import DamagedFile, ModelError, UnsupportedModel

READABLE = {
    "Qwen--Qwen2.5-7B-Instruct_config.json",
    "Qwen--Qwen3-0.6B_config.json",
    "Qwen--Qwen3-1.7B_config.json",
    "Qwen--Qwen3-235B-A22B_config.json",
    "Qwen--Qwen3-30B-A3B_config.json",
    "Qwen--Qwen3-32B_config.json",
    "Qwen--Qwen3-8B_config.json",
    "Qwen--Qwen3-Coder-480B-A35B-Instruct_config.json",
    "Qwen--Qwen3.5-122B-A10B_config.json",
    "Qwen--Qwen3.5-27B_config.json",
    "Qwen--Qwen3.5-35B-A3B_config.json",
    "Qwen--Qwen3.5-397B-A17B_config.json",
    "gemma2_9b.json",
    "gemma3_1b_it.json",
    "google--gemma-4-26B-A4B_config.json",
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct_config.json",
    "meta-llama--Llama-4-Scout-17B-16E-Instruct_config.json",
    "Qwen--Qwen3-VL-8B-Instruct_config.json",
    "Qwen--Qwen3-VL-30B-A3B-Instruct_config.json",
    "MiniMaxAI--MiniMax-M3_config.json",
    "XiaomiMiMo--MiMo-V2-Flash_config.json",
    "moonshotai--Kimi-K2.5_config.json",
    "phi-3_5-vision.json",
    "stepfun-ai--Step-3.7-Flash-FP8_config.json",
    "stepfun-ai--Step-3.7-Flash_config.json",
    "llama2_70b.json",
    "meta-llama--Meta-Llama-3.1-405B_config.json",
    "meta-llama--Meta-Llama-3.1-70B_config.json",
    "meta-llama--Meta-Llama-3.1-8B_config.json",
    "mistralai--Mixtral-8x22B-v0.1_config.json",
    "mistralai--Mixtral-8x7B-v0.1_config.json",
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16_config.json",
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16_config.json",
    "nvidia--Nemotron-H-56B-Base-8K_config.json",
    # quantised by a file beside config.json, which only the directory reader sees
    "nvidia--Llama-3.1-70B-Instruct-FP8_config.json",
    "nvidia--Qwen3-235B-A22B-NVFP4_config.json",
    "phi-3_5.json",
    "phi-4.json",
}

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GEMMA3 = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 32}


def rope_of(spec: ModelSpec, layer: int = 0) -> RopeSpec:
    rope = spec.attentions[layer].rope
    assert rope is not None
    return rope


def test_real_configs_are_read_or_refused_by_name(shared_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read: set[str] = set()
    refused: dict[str, str] = {}
    for file in sorted((shared_dir / "configs").glob("*.json")):
        config = json.loads(file.read_text())
        try:
            spec_from_hf(config)
            read.add(file.name)
        except UnsupportedModel as error:
            refused[file.name] = str(error)
            assert str(config.get("model_type", "no model_type")) in str(error)
    with capsys.disabled():
        print(f"\n{len(read)} configurations read, {len(refused)} refused by name")
    assert read >= READABLE
    assert len(read) + len(refused) == 119


def test_known_facts(shared_dir: Path) -> None:
    configs = shared_dir / "configs"
    llama = read_spec(configs / "meta-llama--Meta-Llama-3.1-8B_config.json")
    assert rope_of(llama) == RopeSpec(500000.0, 128, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    gemma = read_spec(configs / "gemma3_1b_it.json")
    assert [layer.mixer.window for layer in gemma.layers[:7]] == [512] * 5 + [None, 512]
    assert (rope_of(gemma, 0).theta, rope_of(gemma, 5).theta) == (10000.0, 1000000.0)
    assert gemma.eos_token_ids == (1, 106)
    phi = read_spec(configs / "phi-4.json")
    scaling = rope_of(phi).scaling
    assert rope_of(phi).rotary_dim == 96 and isinstance(scaling, LongRopeScaling)
    assert scaling.mscale == pytest.approx(1.1902380714238083)
    assert phi.layers[0].mixer.window is None  # its window is longer than its context


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, LinearScaling(4.0)),
        ({"rope_type": "default"}, None),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
            YarnScaling(4.0, 512, mscale=1.1386294361119891),
        ),
    ],
)
def test_both_styles_of_rope_agree(scaling: dict[str, Any], expected: object) -> None:
    older = spec_from_hf({**LLAMA, "rope_theta": 5000.0, "rope_scaling": scaling})
    newer_scaling = {"rope_type": scaling.get("type", "default"), "rope_theta": 5000.0, **scaling}
    newer = spec_from_hf({**LLAMA, "rope_parameters": newer_scaling})
    assert older == newer
    assert rope_of(older) == RopeSpec(5000.0, 16, expected)  # type: ignore[arg-type]


def test_global_layers_alone_are_scaled_in_gemma3() -> None:
    older = spec_from_hf({**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    newer = spec_from_hf(
        {
            **GEMMA3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    )
    assert older == newer
    assert rope_of(older, 0) == RopeSpec(1e4, 256)
    assert rope_of(older, 5) == RopeSpec(1e6, 256, LinearScaling(8.0))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "rwkv"}, "rwkv"),
        ({"hidden_act": "softsign"}, "softsign"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, "5 bits"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}}, "marlin"),
        ({"quantization_config": {"quant_method": "quanto"}}, "quanto"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "e5m2"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}}, "W4A8_AWQ"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "transform_config": {"a": 1}}}, "transform"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "gemv"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "af4"}}, "af4"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 10**9}, "experts"),
        ({"model_type": "mixtral", "num_key_value_heads": 2, "num_experts_per_tok": 99}, "99 experts per token"),
        ({"rope_theta": 1.0}, "rope_theta"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 5, "high_freq_factor": 4}},
            "high_freq_factor",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"model_type": "phi3", "partial_rotary_factor": 1e308}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1}}, "original_max"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"model_type": "mistral", "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}, "short"),
    ],
)
def test_variants_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        spec_from_hf({**LLAMA, **change})


def test_quantisation_beside_the_config_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_spec(tmp_path).num_layers == 2
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text("{}")
    with pytest.raises(UnsupportedModel, match="hf_quant_config"):
        read_spec(tmp_path)
    beside.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(UnsupportedModel, match="W4A8_AWQ"):
        read_spec(tmp_path)
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}))
    assert read_spec(tmp_path).dtype == "bfloat16"


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, "\udcff"])
def test_damaged_config_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(DamagedFile, match=r"config\.json"):
        read_spec(tmp_path)


def test_absent_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_spec(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_spec(tmp_path)


def test_kimi_linear_as_it_is_published() -> None:
    """Layers are counted from 1, sizes of the recurrence are in a part of their own."""
    spec = spec_from_hf(
        {
            "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 163840, "model_max_length": 1048576,
            "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
            "moe_intermediate_size": 1024, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
            "num_expert_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.446,
            "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
                                   "short_conv_kernel_size": 4},
        }
    )  # fmt: skip
    kinds = ["full" if isinstance(layer.mixer, Mla) else "linear" for layer in spec.layers]
    assert [number for number, kind in enumerate(kinds, start=1) if kind == "full"] == [4, 8, 12, 16, 20, 24, 27]
    assert spec.max_context == 1048576 and num_parameters(spec) / 1e9 == pytest.approx(49.1, rel=0.02)
