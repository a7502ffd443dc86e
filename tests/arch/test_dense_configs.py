"""Configs of published dense models, as their files have them, and their known numbers of parameters."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.arch.cost import num_parameters
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.errors import UnsupportedModel

GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", "n_ctx": 1024,
    "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-5, "vocab_size": 50257,
}  # fmt: skip
FALCON = {
    "model_type": "falcon", "alibi": False, "bias": False, "hidden_size": 4544, "layer_norm_epsilon": 1e-5,
    "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
    "parallel_attn": True, "vocab_size": 65024,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": (GPT2, 124_439_808),
    "pythia-160m": (
        {"model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
         "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12,
         "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
         "vocab_size": 50304},
        162_322_944,
    ),
    "falcon-7b": (FALCON, 6_921_720_704),
    "falcon-40b": (
        {**FALCON, "hidden_size": 8192, "new_decoder_architecture": True, "num_attention_heads": 128,
         "num_hidden_layers": 60, "num_kv_heads": 8},
        41_303_293_952,
    ),
    "gemma-2b": (
        {"model_type": "gemma", "head_dim": 256, "hidden_act": "gelu", "hidden_activation": None, "hidden_size": 2048,
         "intermediate_size": 16384, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 18,
         "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_scaling": None, "vocab_size": 256000},
        2_506_172_416,
    ),
    "opt-125m": (
        {"model_type": "opt", "_remove_final_layer_norm": False, "activation_function": "relu", "ffn_dim": 3072,
         "do_layer_norm_before": True, "hidden_size": 768, "max_position_embeddings": 2048, "num_attention_heads": 12,
         "num_hidden_layers": 12, "vocab_size": 50272, "word_embed_proj_dim": 768},
        125_239_296 - 2 * 768,  # without the two rows of positions that are never used
    ),
    "starcoder": (
        {"model_type": "gpt_bigcode", "activation_function": "gelu", "multi_query": True, "layer_norm_epsilon": 1e-5,
         "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 40, "n_positions": 8192, "vocab_size": 49152},
        15_517_456_384,
    ),
    "gpt-j-6b": (
        {"model_type": "gptj", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_embd": 4096,
         "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048, "rotary_dim": 64,
         "tie_word_embeddings": False, "vocab_size": 50400},
        6_050_882_784,
    ),
    "bloom-560m": (
        {"model_type": "bloom", "apply_residual_connection_post_layernorm": False, "layer_norm_epsilon": 1e-5,
         "n_embed": 1024, "n_inner": None, "n_layer": 24, "num_attention_heads": 16, "seq_length": 2048,
         "vocab_size": 250880},
        559_214_592,
    ),
    "mpt-7b": (
        {"model_type": "mpt", "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "qk_ln": False},
         "d_model": 4096, "max_seq_len": 2048, "n_heads": 32, "n_layers": 32, "no_bias": True, "vocab_size": 50432,
         "norm_type": "low_precision_layernorm", "logit_scale": None},
        6_649_286_656,
    ),
    "olmo-1b": (
        {"model_type": "olmo", "clip_qkv": None, "hidden_size": 2048, "intermediate_size": 8192,
         "num_attention_heads": 16, "num_hidden_layers": 16, "tie_word_embeddings": True, "vocab_size": 50304},
        1_176_764_416,
    ),
    "glm-4-9b": (
        {"model_type": "glm", "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 8192,
         "num_attention_heads": 32, "num_hidden_layers": 40, "partial_rotary_factor": 0.5, "vocab_size": 151552},
        9_399_951_360,
    ),
    "command-r": (
        {"model_type": "cohere", "hidden_size": 8192, "intermediate_size": 22528, "logit_scale": 0.0625,
         "max_position_embeddings": 8192, "model_max_length": 131072, "num_attention_heads": 64,
         "num_hidden_layers": 40, "rope_theta": 8e6, "use_qk_norm": False, "vocab_size": 256000},
        34_980_831_232,
    ),
    "gpt-neo-125m": (
        {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 6]], "hidden_size": 768,
         "intermediate_size": None, "num_heads": 12, "num_layers": 12, "vocab_size": 50257, "window_size": 256},
        125_198_592,
    ),
    "codegen-350m": (
        {"model_type": "codegen", "n_embd": 1024, "n_head": 16, "n_inner": None, "n_layer": 20, "n_positions": 2048,
         "rotary_dim": 32, "tie_word_embeddings": False, "vocab_size": 51200},
        356_712_448,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    config, expected = PUBLISHED[name]
    assert num_parameters(spec_from_hf(config)) == expected


def test_the_context_of_command_r_is_what_it_serves() -> None:
    assert spec_from_hf(PUBLISHED["command-r"][0]).max_context == 131072


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("falcon-7b", {"alibi": True}, "alibi"),
        ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("opt-125m", {"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        ("opt-125m", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("command-r", {"use_qk_norm": True}, "use_qk_norm"),
        ("gpt-neo-125m", {"attention_types": [["global", "x"]]}, "attention_types"),
        ("mpt-7b", {"attn_config": {"alibi": False}}, "alibi false"),
        ("mpt-7b", {"attn_config": {"qk_ln": True}}, "qk_ln"),
        ("mpt-7b", {"no_bias": False}, "no_bias"),
        ("bloom-560m", {"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_variants_that_are_not_implemented_are_refused_by_name(
    name: str, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UnsupportedModel, match=problem):
        spec_from_hf({**PUBLISHED[name][0], **changes})
