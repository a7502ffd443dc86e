"""The output of llama.cpp's converter for dense checkpoints: additional metadata, and changes of tensors."""

from __future__ import annotations

import torch

from tests.support.gguf_converted import Config, Converter, Renamed, Tensors, latent_tensors, of_llama, plain


def _layer_norm(config: Config) -> Config:
    eps = next(config[key] for key in ("layer_norm_eps", "norm_eps", "layer_norm_epsilon") if key in config)
    return {"attention.layer_norm_epsilon": eps, "attention.layer_norm_rms_epsilon": None}


def _gemma_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def _nemotron_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def _rotated(config: Config) -> Config:
    """Return how many dimensions of a head rotate."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"rope.dimension_count": int(size * config["rope_parameters"]["partial_rotary_factor"])}


def _cohere(config: Config) -> Config:
    return {**_layer_norm(config), "logit_scale": config["logit_scale"], "rope.scaling.type": "none"}


def _jais2(config: Config) -> Config:
    return {**_layer_norm(config), "rope.dimension_count": config["head_dim"]}


def _minicpm3(config: Config) -> Config:
    return {
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "attention.value_length": None,
        "rope.dimension_count": config["qk_rope_head_dim"],
    }


def _youtu(config: Config) -> Config:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope,
        "leading_dense_block_count": config["num_hidden_layers"],
    }


def _olmo(config: Config) -> Config:
    return {
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": None,
        "attention.clamp_kqv": config["clip_qkv"],
    }


def _gpt_neox(config: Config) -> Config:
    return {
        **_layer_norm(config),
        **_rotated(config),
        **NO_ROPE_BASE,
        "attention.head_count_kv": None,
        "use_parallel_residual": config["use_parallel_residual"],
    }


def _falcon(config: Config) -> Config:
    is_new = config["new_decoder_architecture"]
    return {
        **_layer_norm(config),
        **NO_ROPE_BASE,
        "attention.head_count_kv": config["num_kv_heads"] if is_new else 1,
        "feed_forward_length": 4 * config["hidden_size"],
        "context_length": 2048,
    }


def _gpt2(config: Config) -> Config:
    return {
        **_layer_norm(config),
        **NO_ROPE_BASE,
        "feed_forward_length": 4 * config["hidden_size"],
        "attention.head_count_kv": 1 if config.get("multi_query") else None,
    }


def _bloom(config: Config) -> Config:
    return {
        **_layer_norm(config),
        **NO_ROPE_BASE,
        "context_length": config["hidden_size"],
        "feed_forward_length": 4 * config["hidden_size"],
        "attention.head_count_kv": config["num_attention_heads"],
    }


def _mpt(config: Config) -> Config:
    return {
        **_layer_norm(config),
        **NO_ROPE_BASE,
        "feed_forward_length": 4 * config["hidden_size"],
        "attention.head_count_kv": None,
        "attention.clamp_kqv": config["attn_config"]["clip_qkv"],
        "attention.max_alibi_bias": float(config["attn_config"]["alibi_bias_max"]),
    }


def _hunyuan(config: Config) -> Config:
    rope, size = config["rope_parameters"], config["head_dim"]
    return {"rope.freq_base": rope["rope_theta"] * rope["alpha"] ** (size / (size - 2))}


def _by_part(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    """Order rows as all queries, then all keys, then all values; checkpoints interleave them by head."""
    if "query_key_value" in name:
        heads, kv_heads = config["num_attention_heads"], config["num_attention_heads"]
        if config["model_type"] == "falcon":
            kv_heads = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
        size = config["hidden_size"] // heads
        parts = tensor.view(kv_heads, heads // kv_heads + 2, size, *tensor.shape[1:])
        rows = (parts[:, :-2], parts[:, [-2]], parts[:, [-1]])
        tensor = torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in rows])
    yield name, tensor


def _bloom_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    yield from _by_part(name.removeprefix("transformer."), tensor, config)


def _gpt2_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    is_transposed = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    yield name, tensor.t() if is_transposed else tensor


def _apertus_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    """Leave out the activations' parameters, which become metadata (`xielu_metadata`)."""
    if ".act_fn." not in name:
        yield name, tensor


def xielu_metadata(tensors: Tensors, num_layers: int) -> dict[str, list[float]]:
    return {
        f"xielu.{number}": [float(tensors[f"model.layers.{layer}.mlp.act_fn.{number}"]) for layer in range(num_layers)]
        for number in ("alpha_p", "alpha_n", "beta", "eps")
    }


NO_ROPE_BASE = {"rope.freq_base": None}
DENSE_CONVERTERS: dict[str, Converter] = {
    "gemma": (lambda config: {}, _gemma_tensors),
    "chatglm": (_rotated, plain),
    "glm4": (_rotated, plain),
    "arcee": (lambda config: {}, of_llama),
    "command-r": (_cohere, plain),
    "nemotron": (lambda config: {**_layer_norm(config), **_rotated(config)}, _nemotron_tensors),
    "jais2": (_jais2, plain),
    "minicpm3": (_minicpm3, plain),
    "olmo": (_olmo, of_llama),
    "apertus": (lambda config: {}, _apertus_tensors),
    "gptneox": (_gpt_neox, _by_part),
    "falcon": (_falcon, _by_part),
    "gpt2": (_gpt2, _gpt2_tensors),
    "starcoder": (_gpt2, plain),
    "bloom": (_bloom, _bloom_tensors),
    "mpt": (_mpt, plain),
    "phi2": (lambda config: {**_layer_norm(config), **_rotated(config), **NO_ROPE_BASE}, plain),
    "stablelm": (lambda config: {**_layer_norm(config), **_rotated(config)}, plain),
    "hunyuan-dense": (_hunyuan, plain),
    "youtu": (_youtu, latent_tensors),
}
