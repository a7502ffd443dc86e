"""Tiny random models of dense families, from current small ones to GPT-2: how their configs differ from
`tiny_models.SIZES`."""

from __future__ import annotations

from typing import Any

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HALF_ROPE = {**ROPE, "partial_rotary_factor": 0.5}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": 256,
}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 6.0, "logits_scaling": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}  # fmt: skip
WINDOWS = {"sliding_window": 9, "num_hidden_layers": 4}
# Their configs use other keys.
OLDER = {"tie_word_embeddings": False, "num_key_value_heads": None, "intermediate_size": None}
# name: (config class, what differs)
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", {"head_dim": 16, "tie_word_embeddings": True}),
    "vaultgemma": (
        "VaultGemmaConfig",
        {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 3.0},
    ),
    "glm": ("GlmConfig", {"head_dim": 12, "rope_parameters": {**ROPE, "partial_rotary_factor": 2 / 3}}),
    "glm4": ("Glm4Config", {"head_dim": 16, "rope_parameters": HALF_ROPE}),
    "arcee": ("ArceeConfig", {"mlp_bias": True}),
    "cohere": ("CohereConfig", {"logit_scale": 3.0, "attention_bias": True}),
    "cwm": ("CwmConfig", {**WINDOWS, "head_dim": 16, "rope_parameters": LLAMA3}),
    "ministral": (
        "MinistralConfig",
        {**WINDOWS, "head_dim": 16, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "granite_swa": (
        "GraniteSWAConfig", {**MULTIPLIERS, **WINDOWS, "logits_scaling": 0.5, "layer_rope_theta": [0, 1e4, 5e5, 1e4]}
    ),
    "helium": ("HeliumConfig", {"head_dim": 12}),
    "hyperclovax": ("HyperCLOVAXConfig", MULTIPLIERS),
    "hyperclovax_plain": ("HyperCLOVAXConfig", {"use_post_norm": False}),
    "jais2": ("Jais2Config", {"head_dim": 12}),
    "nemotron": ("NemotronConfig", {"rope_parameters": HALF_ROPE}),
    "minicpm3": ("MiniCPM3Config", {**LATENT, "rope_parameters": LONG_ROPE, "scale_emb": 3, "dim_model_base": 96}),
    "youtu": ("YoutuConfig", LATENT),
    "olmo": ("OlmoConfig", {"clip_qkv": 0.7}),
    "apertus": ("ApertusConfig", {"head_dim": 12, "rope_parameters": LLAMA3}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None, "rope_parameters": HALF_ROPE}),
    "gpt_neox_sequential": (
        "GPTNeoXConfig", {"num_key_value_heads": None, "use_parallel_residual": False, "rotary_pct": 0.5}
    ),
    "falcon": ("FalconConfig", {**OLDER, "ffn_hidden_size": 80}),
    "falcon_40b": ("FalconConfig", {**OLDER, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon_11b": (
        "FalconConfig", {**OLDER, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
    ),
    "gpt2": ("GPT2Config", {**OLDER, "n_inner": 80, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode": ("GPTBigCodeConfig", {**OLDER, "n_inner": 80}),
    "gpt_bigcode_all_heads": ("GPTBigCodeConfig", {**OLDER, "multi_query": False}),
    "gpt_neo": (
        "GPTNeoConfig",
        {**OLDER, "intermediate_size": 80, "window_size": 9,
         "attention_types": [[["global", "local"], 1], [["local"], 1]]},
    ),
    "opt": ("OPTConfig", {**OLDER, "ffn_dim": 80}),
    "biogpt": ("BioGptConfig", {"num_key_value_heads": None, "tie_word_embeddings": False}),
    "bloom": ("BloomConfig", OLDER),
    "bloom_odd_heads": ("BloomConfig", {**OLDER, "num_attention_heads": 6}),
    "mpt": ("MptConfig", {**OLDER, "attn_config": {"clip_qkv": 0.9}}),
    "nanochat": ("NanoChatConfig", {}),
    "gptj": ("GPTJConfig", {**OLDER, "rotary_dim": 8}),
    "codegen": ("CodeGenConfig", {**OLDER, "rotary_dim": 8}),
}  # fmt: skip
