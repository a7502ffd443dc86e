"""Tiny random models of every family, made by transformers; their windows are shorter than the test sequences."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.dense_models import DENSE
from tests.support.tiny_expert_models import EXPERT_MODELS
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.weights.source import open_weights

VOCAB = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9, "tie_word_embeddings": True}
MOE = {"num_experts_per_tok": 2}
LATENT = {
    **MOE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "moe_intermediate_size": 20,
    "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.8},
}
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
ROUTED = {**MOE, "num_experts": 5, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
# name: (config class, what differs from SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama_llama3_rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "llama_linear_rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 11, "head_dim": 20}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_yarn": ("Qwen2Config", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {**GEMMA, "num_hidden_layers": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "num_hidden_layers": 8}),
    "phi3": ("Phi3Config", {"sliding_window": 13, "original_max_position_embeddings": 256}),
    "phi3_longrope": (
        "Phi3Config",
        {"sliding_window": None, "original_max_position_embeddings": 256, "rope_parameters": LONG_ROPE},
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 16,
            "conv_L_cache": 4,
            "conv_bias": True,
        },
    ),
    "lfm2_no_conv": ("Lfm2Config", {"full_attn_idxs": [0, 1, 2], "block_auto_adjust_ff_dim": False}),
    "mixtral": ("MixtralConfig", {**MOE, "num_local_experts": 4, "sliding_window": None}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**MOE, "num_experts": 5, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
    "qwen2_moe_mixed": (
        "Qwen2MoeConfig",
        {
            **MOE,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT, "q_lora_rank": 20, "n_group": 3, "topk_group": 2}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**LATENT, "q_lora_rank": 20, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**MOE, "head_dim": 16, "num_experts": 5, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "qwen3_next": ("Qwen3NextConfig", {**DELTA, **ROUTED, "mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**DELTA, **ROUTED, "linear_conv_kernel_dim": 3}),
}

# Newer families, each compared in one test (`tests/models/test_current_families.py`).
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HALF_ROPE = {**ROPE, "partial_rotary_factor": 0.5}
MAMBA = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
CHANNELS = {"intermediate_size": 96, "state_size": 6, "time_step_rank": 5}
INDEXED = {"q_lora_rank": 20, "index_n_heads": 6, "index_head_dim": 12, "index_topk": 11}
CURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1], "mlp_bias": True, "rope_parameters": HALF_ROPE}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {**MAMBA, **MOE, "num_local_experts": 5, "shared_intermediate_size": 40, "position_embedding_type": "rope",
         "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_proj_bias": True,
         "embedding_multiplier": 6.0, "logits_scaling": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
         "time_step_limit": [0.01, 0.9]},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {**MOE, "head_dim": 12, "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8,
         "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
         "n_routed_experts": 5, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
         "moe_latent_size": 20, "chunk_size": 16},
    ),
    "granitemoehybrid_dense": (
        "GraniteMoeHybridConfig",
        {**MAMBA, "num_local_experts": 0, "shared_intermediate_size": 40,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "falcon_h1": (
        "FalconH1Config",
        {**MAMBA, "head_dim": 12, "mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
         "rope_parameters": ROPE, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7,
         "embedding_multiplier": 3.0, "key_multiplier": 0.6, "lm_head_multiplier": 0.4, "mlp_multipliers": [0.8, 0.5],
         "ssm_in_multiplier": 1.2, "ssm_multipliers": [0.8, 0.7, 0.9, 1.1, 0.6], "ssm_out_multiplier": 0.9},
    ),
    "falcon_h1_no_norm": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 96, "rope_parameters": ROPE}),
    "kimi_linear": (
        "KimiLinearConfig",
        {**LATENT, "rope_parameters": None, "num_key_value_heads": 4, "head_dim": 8, "linear_head_dim": 8,
         "linear_num_heads": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "mlp_layer_types": ["dense", "sparse", "sparse"], "num_experts": 6, "num_experts_per_token": 2,
         "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 1.7, "q_lora_rank": None},
    ),
    "olmo_hybrid": (  # transformers saves the convolution in three equal parts, so q, k and v are equally wide here
        "OlmoHybridConfig",
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_key_head_dim": 8,
         "linear_value_head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        {**{key: value for key, value in LATENT.items() if key != "n_routed_experts"}, "num_local_experts": 6,
         "n_group": 2, "topk_group": 1, "head_dim": 8, "kda_lower_bound": -2.0, "rope_parameters": ROPE,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "jamba": (
        "JambaConfig",
        {**MOE, "num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 5,
         "mamba_dt_rank": 7, "mamba_proj_bias": True},
    ),
    "jamba_dense": ("JambaConfig", {"num_experts": 1, "attn_layer_period": 3, "attn_layer_offset": 2}),
    "mamba": ("MambaConfig", {**CHANNELS, "use_bias": True}),
    "falcon_mamba": ("FalconMambaConfig", {**CHANNELS, "tie_word_embeddings": False}),
    "mamba2": ("Mamba2Config", {"num_heads": 6, "head_dim": 16, "n_groups": 1, "state_size": 8, "chunk_size": 16}),
    "deepseek_v32": ("DeepseekV32Config", {**LATENT, **INDEXED, "n_group": 3, "topk_group": 2}),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {**LATENT, **INDEXED, "num_hidden_layers": 5, "rope_parameters": {"rope_theta": 1e6},
         "indexer_types": ["full", "shared", "full", "shared", "shared"]},
    ),
    "deepseek_v4": (
        "DeepseekV4Config",
        {**MOE, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16, "partial_rotary_factor": 0.5,
         "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
         "compressed_sparse_attention"], "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
         "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
         "q_lora_rank": 20, "sliding_window": 7, "o_groups": 2, "o_lora_rank": 10, "index_n_heads": 6,
         "index_head_dim": 12, "index_topk": 4, "hc_mult": 3, "hc_sinkhorn_iters": 3, "n_routed_experts": 5,
         "moe_intermediate_size": 24, "rope_parameters": {**YARN_ROPE, "original_max_position_embeddings": 16}},
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "ministral3": (
        "Ministral3Config",
        {"head_dim": 12, "rope_parameters": {**YARN_ROPE, "original_max_position_embeddings": 16,
         "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 9, "num_hidden_layers": 4}),
    "granite": (
        "GraniteConfig",
        {"embedding_multiplier": 6.0, "logits_scaling": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2},
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "exaone4_no_windows": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16, "use_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_intermediate_size": 24, "moe_k": 2, "moe_num_experts": 5, "moe_layer_end_index": 2},
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 11}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True, "rope_parameters": HALF_ROPE}),
    "stablelm_parallel": ("StableLmConfig", {"use_parallel_residual": True, "rope_parameters": HALF_ROPE}),
    "cohere2": (
        "Cohere2Config",
        {"sliding_window": 9, "logit_scale": 3.0, "layer_types": ["sliding_attention", "full_attention"] * 2,
         "num_hidden_layers": 4, "head_dim": 12},
    ),
    "phi": ("PhiConfig", {"rope_parameters": HALF_ROPE}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1Config",
        {"head_dim": 12, "rope_parameters": {**ROPE, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {"head_dim": 12, "num_experts": 4, "moe_topk": 2}),
    "hy_v3": (
        "HYV3Config",
        {**MOE, "head_dim": 12, "num_experts": 5, "moe_intermediate_size": 24, "router_scaling_factor": 1.7},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**MOE, "head_dim": 12, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24,
         "routed_scaling_factor": 1.4, "use_qk_norm": True, "attention_bias": True, "rope_parameters": HALF_ROPE},
    ),
    "minimax_m2": (
        "MiniMaxM2Config", {**MOE, "head_dim": 12, "num_local_experts": 5, "rope_parameters": HALF_ROPE}
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {**MOE, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 12, "sliding_window": 9,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
         "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 20,
         "routed_scaling_factor": 1.3},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {**MOE, "layer_types": ["conv", "full_attention", "conv"], "num_experts": 5, "num_dense_layers": 1,
         "moe_intermediate_size": 24},
    ),
    "llama4": (
        "Llama4TextConfig",
        {"head_dim": 12, "num_hidden_layers": 4, "intermediate_size_mlp": 56, "num_local_experts": 4,
         "interleave_moe_layer_step": 2, "attention_chunk_size": 8, "floor_scale": 8,
         "no_rope_layers": [1, 1, 1, 0]},
    ),
    "gpt_oss": ("GptOssConfig", {**MOE, "head_dim": 12, "num_local_experts": 5, "sliding_window": 9,
         "rope_parameters": {**YARN_ROPE, "truncate": False}}),
    "gemma3n": (
        "Gemma3nTextConfig",
        {"head_dim": 16, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "intermediate_size": [80, 80, 64, 64, 72],
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB - 20, "sliding_window": 9,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] + ["sliding_attention",
         "full_attention"], "tie_word_embeddings": True, "laurel_rank": 6, "altup_num_inputs": 3,
         "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.0]},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {"head_dim": 16, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "sliding_window": 9,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] + ["sliding_attention",
         "full_attention"], "tie_word_embeddings": True, "final_logit_softcapping": 8.0,
         "per_layer_config": {"2": {"head_dim": 24}, "4": {"head_dim": 24}}},
    ),
    "gemma4_moe": (
        "Gemma4TextConfig",
        {"head_dim": 16, "hidden_size_per_layer_input": 0, "sliding_window": 9, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "attention_k_eq_v": True,
         "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24,
         "per_layer_config": {"2": {"head_dim": 24, "num_key_value_heads": 1}}},
    ),
    **DENSE,
    **EXPERT_MODELS,
}  # fmt: skip

DELTA_SIZES = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
MAMBA_SIZES = {"mamba_d_state": 16}
NATIVE_SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), DELTA_SIZES),
    **dict.fromkeys(
        ("bamba", "granitemoehybrid", "granitemoehybrid_dense", "falcon_h1", "falcon_h1_no_norm"), MAMBA_SIZES
    ),
    "nemotron_h": {"ssm_state_size": 16},
    "kimi_linear": {"linear_head_dim": 16},
    "olmo_hybrid": DELTA_SIZES,
    "bailing_hybrid": {"head_dim": 16},
    "mamba2": {"state_size": 16},
    "gemma4_moe": {"per_layer_config": {"2": {"head_dim": 512, "num_key_value_heads": 1}}},
}
"""Recurrent heads whose sizes the native kernels take, and the largest heads of attention that there are"""


def make_reference(name: str, seed: int = 0, **others: Any) -> transformers.PreTrainedModel:
    """Make a float32 model in which every tensor, norms included, is far from trivial; `others`: sizes that replace
    the usual ones."""
    kind, changes = {**FAMILIES, **CURRENT}[name]
    config = getattr(transformers, kind)(**{**SIZES, **changes, **others})
    config._attn_implementation = "eager"
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of torch.jit, in GPT-BigCode's module
        return randomised(transformers.AutoModelForCausalLM.from_config(config), seed)


def randomised(model: transformers.PreTrainedModel, seed: int = 0) -> transformers.PreTrainedModel:
    """Return the model in float32, with every tensor, norms included, far from trivial."""
    model, config = model.float().eval(), model.config
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in parameter_name
            # A large tied embedding would make every token predict itself.
            scale = 0.03 if "embed" in parameter_name and getattr(config, "tie_word_embeddings", False) else 0.2
            parameter.copy_(parameter * is_norm + scale * noise)
        for buffer_name, buffer in model.named_buffers():  # biases of expert routing, scalars of layers
            if buffer_name.endswith(("_bias", "layer_scalar")):
                buffer.copy_(buffer + 0.2 * torch.randn(buffer.shape, generator=generator))
            if buffer_name.endswith("tid2eid"):  # experts selected by a table of token ids
                orders = torch.rand(len(buffer), config.n_routed_experts, generator=generator).argsort(-1)
                buffer.copy_(orders[:, : buffer.shape[1]])
    return model


def load_ours(reference: transformers.PreTrainedModel, directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Load the same model from its files, with our config reader and weight rules."""
    reference.save_pretrained(directory)
    spec = spec_from_hf(json.loads((directory / "config.json").read_text()))
    weights = open_weights(directory, spec)
    weights.check()
    return Decoder(spec, Loader(weights, REFERENCE_OPS, dtype, torch.device("cpu")))
