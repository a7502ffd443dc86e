"""The output of llama.cpp's converter for checkpoints with routed experts: additional metadata, and changes of
tensors."""

from __future__ import annotations

import math

import torch

from tests.support.gguf_converted import Config, Converter, Renamed, block_of, granite, granite_tensors, plain


def _olmoe(config: Config) -> Config:
    return {"expert_count": config["num_experts"]}


def _sigmoid(config: Config) -> Config:
    return {
        "leading_dense_block_count": config.get("first_k_dense_replace"),
        "expert_count": config.get("n_routed_experts") or config.get("num_experts"),
        "expert_shared_count": config.get("n_shared_experts") or config.get("num_shared_experts"),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": config.get("routed_scaling_factor"),
        "expert_weights_norm": config.get("norm_topk_prob"),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_gating_func": 2,
    }


def _biased_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    for ending in ("e_score_correction_bias", "expert_bias"):
        if name.endswith(ending):
            yield f"{block_of(name)}exp_probs_b.bias", tensor
            return
    yield name, tensor


def _windows(config: Config) -> Config:
    pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": pattern,
        "rope.scaling.type": "none",
    }


def _trinity(config: Config) -> Config:
    found = {**_sigmoid(config), "leading_dense_block_count": config["num_dense_layers"]}
    return {
        **found,
        "expert_weights_scale": config["route_scale"],
        "attention.sliding_window": config["sliding_window"],
        "rope.dimension_count": config["head_dim"],
    }


def _phimoe(config: Config) -> Config:
    rope, stretch = config["rope_parameters"], 1.0
    original = rope["original_max_position_embeddings"]
    if config["max_position_embeddings"] > original:
        stretch = math.sqrt(1 + math.log(config["max_position_embeddings"] / original) / math.log(original))
    return {
        "expert_count": config["num_local_experts"],
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": stretch,
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "attention.sliding_window": 0,
    }


def _phimoe_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    if "block_sparse_moe.experts" in name:
        part = {"w1": "gate", "w2": "down", "w3": "up"}[name.split(".")[-2]]
        yield f"{block_of(name)}ffn_{part}_exps.weight", tensor
        return
    yield name, tensor
    if name == "model.norm.weight":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", torch.tensor(config["rope_parameters"][f"{kind}_factor"])


def _dbrx(config: Config) -> Config:
    attention, experts = config["attn_config"], config["ffn_config"]
    return {
        "feed_forward_length": experts["ffn_hidden_size"],
        "attention.clamp_kqv": float(attention["clip_qkv"]),
        "attention.layer_norm_epsilon": 1e-5,
        "expert_count": experts["moe_num_experts"],
        "expert_used_count": experts["moe_top_k"],
    }


def _dbrx_tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    if ".experts.mlp." not in name:
        yield name, tensor
        return
    part = name.rpartition(".")[2]
    matrices = tensor.view(config["ffn_config"]["moe_num_experts"], -1, config["d_model"])
    yield name + ".weight", matrices.transpose(1, 2) if part == "w2" else matrices


EXPERT_CONVERTERS: dict[str, Converter] = {
    "olmoe": (_olmoe, plain),
    "granitemoe": (granite, granite_tensors),
    "dots1": (_sigmoid, _biased_tensors),
    "exaone-moe": (lambda config: {**_sigmoid(config), **_windows(config)}, _biased_tensors),
    "afmoe": (_trinity, _biased_tensors),
    "phimoe": (_phimoe, _phimoe_tensors),
    "dbrx": (_dbrx, _dbrx_tensors),
}
