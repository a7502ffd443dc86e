"""The output of llama.cpp's converter for checkpoints with latent attention, recurrent layers, or Gemma 4's:
metadata under its keys, and tensors under the names of the `gguf` package, with the converter's transpositions,
orders and signs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch

from tests.support.gguf_families import VOCABULARY
from tests.support.gguf_recurrent import RECURRENT
from tokenmill.weights.gguf_write import padded_vocabulary

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Renamed = Iterator[tuple[str, torch.Tensor]]
Edit = Callable[[str, torch.Tensor, Config], Renamed]
Converter = tuple[Callable[[Config], Config], Edit]  # metadata, and changes of tensors
ADDS: dict[type, str] = {
    bool: "add_bool",
    int: "add_uint32",
    float: "add_float32",
    str: "add_string",
    list: "add_array",
}


def write_converted(
    path: Path,
    arch: str,
    config: Config,
    tensors: Tensors,
    *,
    is_old: bool = False,
    converter: Converter | None = None,
    more: Config | None = None,
) -> None:
    """Write a GGUF file as the converter would. `is_old`: as files with latent attention were before each head had
    its own matrices; `more`: metadata without the architecture's prefix."""
    metadata, edit = (_old_latent, plain) if is_old else converter or CONVERTERS[arch]
    writer = gguf.GGUFWriter(path, arch)
    for key, value in padded_vocabulary(VOCABULARY, config["vocab_size"]).items():
        getattr(writer, ADDS[type(value)])(key, value)
    for key, value in (more or {}).items():
        getattr(writer, ADDS[type(value)])(key, value)
    for key, value in {**_common(config), **metadata(config)}.items():
        if value is not None:
            getattr(writer, ADDS[type(value)])(f"{arch}.{key}", value)
    kind = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, _num_blocks(config))
    for theirs, tensor in stacked(tensors).items():
        for name, part in edit(theirs, tensor, config):
            found = (
                name
                if name.startswith(("blk.", "rope_factors"))
                else names.get_name(name, try_suffixes=(".weight", ".bias"))
            )
            assert found is not None, name
            writer.add_tensor(found, part.float().contiguous().numpy())
    if arch == "gemma4":
        writer.add_tensor("rope_freqs.weight", _turning(config).numpy())
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama3_factors(config: Config) -> torch.Tensor:
    """Return the factor of each frequency, as the converter computes it for Llama."""
    rope, size = config["rope_parameters"], config["head_dim"]
    lengths = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, size, 2) / size)
    low, high = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
    smooth = (rope["original_max_position_embeddings"] / lengths - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return torch.where(lengths < high, 1.0, torch.where(lengths > low, rope["factor"], between))


def _num_blocks(config: Config) -> int:
    return int(config.get("num_hidden_layers") or len(config["layers_block_type"]))


def _common(config: Config) -> Config:
    rope = config.get("rope_parameters") or {}
    found = {
        "block_count": _num_blocks(config),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size", 0),
        "context_length": config.get("max_position_embeddings", config.get("model_max_length")),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", config.get("layer_norm_epsilon")),
        "rope.freq_base": rope.get("rope_theta", 10000.0),
        "expert_used_count": config.get("num_experts_per_tok"),
    }
    if config.get("head_dim"):
        found |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if rope.get("rope_type") == "yarn":
        found["rope.scaling.type"] = "yarn"
        found["rope.scaling.factor"] = rope["factor"]
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def stacked(tensors: Tensors) -> Tensors:
    """Stack the matrices of all experts, and those of all streams."""
    found: Tensors = {}
    groups: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.(?:experts|altup_projections|altup_unembed_projections))\.(\d+)\.(.*)", name)
        if match is None:
            found[name] = tensor
        else:
            groups.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
    return found | {name: torch.stack([each[number] for number in sorted(each)]) for name, each in groups.items()}


def block_of(name: str) -> str:
    found = re.search(r"layers\.(\d+)\.", name)
    assert found is not None
    return f"blk.{found[1]}."


# ── latent attention ───────────────────────────────────────────────────────────────────────────────────


def _latent(config: Config) -> Config:
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    rope = config.get("rope_parameters") or {}
    is_sigmoid = config["model_type"] != "deepseek_v2"
    return {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.key_length": rank + rope_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope_dim,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope_dim,
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"] if "mscale_all_dim" in rope else None,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": True if is_sigmoid and config.get("norm_topk_prob", True) else None,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_gating_func": 2 if is_sigmoid else 1,
    }


def _old_latent(config: Config) -> Config:
    size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    found = {key: value for key, value in _latent(config).items() if not key.endswith("_mla")}
    return {**found, "attention.key_length": size, "attention.value_length": config["v_head_dim"]}


def latent_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    if name.endswith("e_score_correction_bias"):
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor
    elif name.endswith("kv_b_proj.weight"):
        nope = config["qk_nope_head_dim"]
        heads = tensor.view(config["num_attention_heads"], nope + config["v_head_dim"], -1)
        yield name.replace("kv_b_proj", "k_b_proj"), heads[:, :nope].transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), heads[:, nope:]
    else:
        yield name, tensor


def _kimi(config: Config) -> Config:
    kinds = config["layer_types"]
    shared = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    same = {ours: config[theirs] for ours, theirs in shared.items()}
    dense = config["mlp_layer_types"].count("dense")
    return {
        **_latent(
            {**config, **same, "q_lora_rank": None, "first_k_dense_replace": dense, "n_group": 1, "topk_group": 1}
        ),
        "attention.head_count_kv": [int(kind == "full_attention") for kind in kinds],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        "expert_used_count": config["num_experts_per_token"],
    }


def _kimi_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    own = {"f_a": "ssm_f_a", "f_b": "ssm_f_b", "g_a": "ssm_g_a", "g_b": "ssm_g_b", "b": "ssm_beta"}
    part = re.search(r"self_attn\.(\w+)_proj\.weight", name)
    conv = re.search(r"self_attn\.([qkv])_conv1d\.weight", name)
    experts = re.search(r"block_sparse_moe\.experts\.(w[123])\.weight", name)
    if part is not None and part[1] in own:
        yield f"{block_of(name)}{own[part[1]]}.weight", tensor
    elif conv is not None:
        yield f"{block_of(name)}ssm_conv1d_{conv[1]}.weight", tensor.reshape(1, tensor.shape[0], 1, -1)
    elif name.endswith("A_log"):
        yield f"{block_of(name)}ssm_a", -tensor.exp().reshape(1, 1, -1, 1)
    elif name.endswith("dt_bias"):
        yield f"{block_of(name)}ssm_dt.bias", tensor
    elif name.endswith("o_norm.weight"):
        yield f"{block_of(name)}ssm_norm.weight", tensor
    elif experts is not None:
        kind = {"w1": "gate", "w2": "down", "w3": "up"}[experts[1]]
        yield f"{block_of(name)}ffn_{kind}_exps.weight", tensor
    else:
        yield from latent_tensors(name.replace("block_sparse_moe", "mlp"), tensor, config)


# ── recurrent layers ───────────────────────────────────────────────────────────────────────────────────


def _shared_experts(config: Config) -> Config:
    return {
        "expert_count": config.get("num_experts"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def plain(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    yield name, tensor


def _delta(config: Config) -> Config:
    return {
        **_shared_experts(config),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "full_attention_interval": config.get("full_attention_interval", 4),
        "rope.dimension_count": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
    }


def _delta_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if "in_proj_qkvz" in name:
        sizes = [key_dim, key_dim, values // keys * value_dim, values // keys * value_dim]
        q, k, v, z = (one.flatten(0, 1) for one in tensor.view(keys, sum(sizes), -1).split(sizes, dim=1))
        yield f"{block_of(name)}attn_qkv.weight", torch.cat((q, k, v))
        yield f"{block_of(name)}attn_gate.weight", z
        return
    if config["model_type"] != "qwen3_next":
        tensor = _in_turns(name, tensor, keys, values, 2 * keys * key_dim, value_dim)
    if name.endswith("A_log"):
        yield f"{block_of(name)}ssm_a", -tensor.exp()
    elif name.endswith("dt_bias"):
        yield f"{block_of(name)}ssm_dt.bias", tensor
    elif name.endswith("conv1d.weight"):
        yield name, tensor.squeeze(1)
    elif name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        yield f"{block_of(name)}ffn_gate_exps.weight", gate
        yield f"{block_of(name)}ffn_up_exps.weight", up
    else:
        yield name + (".weight" if name.endswith("experts.down_proj") else ""), tensor


def _in_turns(name: str, tensor: torch.Tensor, keys: int, values: int, first: int, size: int) -> torch.Tensor:
    """Value heads as the converter orders them: the first of every key head, then the second"""

    def turned(rows: torch.Tensor, width: int) -> torch.Tensor:
        return rows.reshape(keys, values // keys, width, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    if ".linear_attn." not in name or keys == values:
        return tensor
    if "in_proj_qkv." in name or "conv1d" in name:
        return torch.cat((tensor[:first], turned(tensor[first:], size)))
    if "in_proj_z" in name:
        return turned(tensor, size)
    if "out_proj" in name:
        return turned(tensor.t(), size).t()
    is_of_heads = any(part in name for part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"))
    return turned(tensor, 1) if is_of_heads else tensor


def _mamba(config: Config) -> Config:
    inner = config["mamba_n_heads"] * config["mamba_d_head"]
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.inner_size": inner,
    }


def _mamba_tensors(name: str, tensor: torch.Tensor, groups: int) -> Renamed:
    if name.endswith("A_log"):
        yield f"{block_of(name)}ssm_a", -tensor.exp().unsqueeze(-1)
    elif name.endswith(("mamba.D", "mixer.D")):
        yield f"{block_of(name)}ssm_d", tensor.unsqueeze(-1)
    elif name.endswith("dt_bias"):
        yield f"{block_of(name)}ssm_dt.bias", tensor
    elif name.endswith("conv1d.weight"):
        yield name, tensor.squeeze(1)
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        yield name, tensor.view(groups, -1)
    else:
        yield name, tensor


def _granite_hybrid(config: Config) -> Config:
    attends = [kind in ("attention", "full_attention") for kind in config["layer_types"]]
    return {
        **_mamba(config),
        "attention.head_count_kv": [config["num_key_value_heads"] * one for one in attends],
        **granite(config),
        "rope.scaling.finetuned": False,
    }


def granite(config: Config) -> Config:
    """Granite's multipliers, and its experts"""
    return {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "expert_count": config["num_local_experts"] or None,
        "expert_shared_feed_forward_length": config.get("shared_intermediate_size") or None,
    }


def _hybrid_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    for same, turned in granite_tensors(name, tensor, config):
        yield from _mamba_tensors(same, turned, config["mamba_n_groups"])


def granite_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    ending = "_shexp" if config["num_local_experts"] else ""
    for theirs, ours in (("shared_mlp", ending), ("block_sparse_moe", "_exps")):
        if f"{theirs}.input_linear" in name:
            gate, up = tensor.chunk(2, dim=-2)
            yield f"{block_of(name)}ffn_gate{ours}.weight", gate
            yield f"{block_of(name)}ffn_up{ours}.weight", up
            return
        if f"{theirs}.output_linear" in name:
            yield f"{block_of(name)}ffn_down{ours}.weight", tensor
            return
    yield from of_llama(name, tensor, config)


def _falcon_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    """With every multiplier in its matrix"""
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * config["attention_in_multiplier"],
        "q_proj": config["attention_in_multiplier"],
        "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    tensor = tensor * next((factor for part, factor in factors.items() if part in name), 1.0)
    if "in_proj" in name:
        width, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        parts = tensor.split([width, width, states, states, config["mamba_n_heads"]])
        tensor = torch.cat([part * one for part, one in zip(parts, config["ssm_multipliers"], strict=True)])
    yield from _mamba_tensors(name, tensor, config["mamba_n_groups"])


def _nemotron(config: Config) -> Config:
    kinds = config["layers_block_type"]
    width = config["moe_intermediate_size"] if "moe" in kinds else config["intermediate_size"]
    found = {
        "block_count": len(kinds),
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [width * (kind in ("moe", "mlp")) for kind in kinds],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
    }
    if "moe" not in kinds:
        return {**found, "expert_used_count": None}
    return {
        **found,
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_group_count": config["n_group"],
        "moe_latent_size": config.get("moe_latent_size"),
    }


def _nemotron_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    name = name.replace("model.layers", "backbone.layers")
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if ".mixer.experts." in name:
        yield name.replace("backbone", "model").replace("mixer", "mlp"), tensor
    else:
        yield from _mamba_tensors(name, tensor, config["n_groups"])


# ── Gemma 4 ────────────────────────────────────────────────────────────────────────────────────────────


def _of_global_layers(config: Config) -> dict[str, int]:
    found: dict[str, int] = config["per_layer_config"][str(config["layer_types"].index("full_attention"))]
    return found


def _gemma4(config: Config) -> Config:
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    rope, heads = config["rope_parameters"], config["num_key_value_heads"]
    whole, shared = _of_global_layers(config).get("num_key_value_heads"), config["num_kv_shared_layers"]
    size = _of_global_layers(config)["head_dim"]
    first = len(windowed) - shared if shared else len(windowed)
    width, is_doubled = config["intermediate_size"], config["use_double_wide_mlp"]
    return {
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.head_count_kv": heads if whole is None else [heads if one else whole for one in windowed],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"] or 0,
        "feed_forward_length": [width * (1 + (at >= first)) for at in range(len(windowed))] if is_doubled else width,
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "rope.dimension_count": size,
        "rope.dimension_count_swa": config["head_dim"],
        "expert_count": config["num_experts"] if config["enable_moe_block"] else None,
        "expert_used_count": config["top_k_experts"] if config["enable_moe_block"] else None,
        "expert_feed_forward_length": config["moe_intermediate_size"] if config["enable_moe_block"] else None,
    }


def _gemma4_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    if name.endswith("router.scale"):
        yield f"{block_of(name)}ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"{block_of(name)}ffn_down_exps.scale", tensor
    else:
        yield name + (".weight" if name.endswith(("layer_scalar", "gate_up_proj", "experts.down_proj")) else ""), tensor


def _turning(config: Config) -> torch.Tensor:
    half = _of_global_layers(config)["head_dim"] // 2
    turning = int(half * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    return torch.tensor([1.0] * turning + [1e30] * (half - turning))


# ── Gemma 3n and Llama 4 ───────────────────────────────────────────────────────────────────────────────


def _gemma3n(config: Config) -> Config:
    rope = config["rope_parameters"]
    shares = torch.tensor(config["activation_sparsity_pattern"])
    return {
        "feed_forward_length": config["intermediate_size"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "activation_sparsity_scale": torch.distributions.Normal(0.0, 1.0).icdf(shares).tolist(),
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }


def _gemma3n_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    """Matrices of streams were stacked before."""
    yield name + (".weight" if name.endswith("_scale") else ""), tensor


def _llama4(config: Config) -> Config:
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_count": config["num_local_experts"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
    }


def _llama4_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.transpose(-1, -2).chunk(2, dim=-2)
        yield f"{block_of(name)}ffn_gate_exps.weight", gate
        yield f"{block_of(name)}ffn_up_exps.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"{block_of(name)}ffn_down_exps.weight", tensor.transpose(-1, -2)
    else:
        yield name, tensor


def _sparse_latent(config: Config) -> Config:
    return {
        **_latent(config),
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "attention.indexer.types": [kind == "full" for kind in config["indexer_types"]],
    }


# ── families with few differences ──────────────────────────────────────────────────────────────────────


def _growing(config: Config) -> Config:
    rope = config["rope_parameters"]
    return {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def of_llama(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    heads = re.search(r"self_attn\.([qk])_proj", name)
    if heads is not None:
        count = config["num_attention_heads" if heads[1] == "q" else "num_key_value_heads"]
        tensor = tensor.view(count, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
    yield name, tensor


def _cohere2(config: Config) -> Config:
    return {
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
        "logit_scale": config["logit_scale"],
        "attention.sliding_window": config["sliding_window"],
    }


def _layer_norm(config: Config) -> Config:
    return {"attention.layer_norm_epsilon": config["norm_epsilon"]}


def _sections(config: Config) -> Config:
    """Metadata of Qwen's models with a part that sees"""
    experts = {"num_experts": config.get("num_local_experts"), **config}
    return {"rope.dimension_sections": [2, 2, 2, 0], "n_deepstack_layers": 3, **_shared_experts(experts)}


def _mimo(config: Config) -> Config:
    windowed, rope = [kind == "sliding_attention" for kind in config["layer_types"]], config["rope_parameters"]
    heads = config["num_key_value_heads"]
    return {
        "attention.head_count_kv": [2 * heads if one else heads for one in windowed],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windowed,
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "rope.dimension_count": int(config["head_dim"] * rope["full_attention"]["partial_rotary_factor"]),
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }


def _mimo_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    renamed = name.replace("e_score_correction_bias", "e_score_correction.bias")
    yield renamed + ".weight" if name.endswith("attention_sink_bias") else renamed, tensor


def _step(config: Config) -> Config:
    windowed, rope = [kind == "sliding_attention" for kind in config["layer_types"]], config["rope_parameters"]
    heads, others = config["num_attention_heads"], config["num_sliding_attention_heads"]
    return {
        "attention.head_count": [others if one else heads for one in windowed],
        "attention.head_count_kv": [config["num_key_value_heads"]] * len(windowed),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windowed,
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["share_expert_dim"],
        "expert_weights_scale": config["moe_router_scaling_factor"],
        "leading_dense_block_count": config["mlp_layer_types"].index("sparse"),
        "swiglu_clamp_exp": [float(limit) for limit in config["swiglu_limits"]],
        "swiglu_clamp_shexp": [float(limit) for limit in config["swiglu_limits_shared"]],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }


def _step_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    if not name.startswith(("vision_model.", "vit_large_projector.")):
        plus = 1.0 if name.endswith("norm.weight") else 0.0
        yield name + ".bias" if name.endswith("router_bias") else name, tensor + plus


CONVERTERS: dict[str, Converter] = {
    "qwen2vl": (_sections, plain),
    "qwen3vl": (_sections, plain),
    "qwen3vlmoe": (_sections, plain),
    "mimo2": (_mimo, _mimo_tensors),
    "step35": (_step, _step_tensors),
    "deepseek2": (_latent, latent_tensors),
    "kimi-linear": (_kimi, _kimi_tensors),
    "qwen2moe": (_shared_experts, plain),
    "qwen3next": (_delta, _delta_tensors),
    "qwen35": (_delta, _delta_tensors),
    "qwen35moe": (_delta, _delta_tensors),
    "granitehybrid": (_granite_hybrid, _hybrid_tensors),
    "falcon-h1": (_mamba, _falcon_tensors),
    "nemotron_h": (_nemotron, _nemotron_tensors),
    "nemotron_h_moe": (_nemotron, _nemotron_tensors),
    "gemma4": (_gemma4, _gemma4_tensors),
    "gemma3n": (_gemma3n, _gemma3n_tensors),
    "llama4": (_llama4, _llama4_tensors),
    "glm-dsa": (_sparse_latent, latent_tensors),
    "mistral3": (_growing, of_llama),
    "cohere2": (_cohere2, plain),
    "ernie4_5": (lambda _: {}, plain),
    "starcoder2": (_layer_norm, plain),
    **RECURRENT,
}
