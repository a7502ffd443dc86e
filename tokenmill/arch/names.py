"""Weight names most families share: Hugging Face's (without the leading "model.") and llama.cpp's."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.rules import Rule, Rules

HF_ATTENTION: Rules = {
    f"layers.{{i}}.{ours}.{kind}": Rule(f"model.layers.{{i}}.self_attn.{ours}_proj.{kind}")
    for ours in ("q", "k", "v", "o")
    for kind in ("weight", "bias")
}

HF_MLP: Rules = {
    f"layers.{{i}}.{ours}.{kind}": Rule(f"model.layers.{{i}}.mlp.{ours}_proj.{kind}")
    for ours in ("gate", "up", "down")
    for kind in ("weight", "bias")
}

HF_QK_NORM: Rules = {
    "layers.{i}.q_norm.weight": Rule("model.layers.{i}.self_attn.q_norm.weight"),
    "layers.{i}.k_norm.weight": Rule("model.layers.{i}.self_attn.k_norm.weight"),
}

HF_LLAMA: Rules = {
    "embed.weight": Rule("model.embed_tokens.weight"),
    "layers.{i}.attn_norm.weight": Rule("model.layers.{i}.input_layernorm.weight"),
    **HF_ATTENTION,
    "layers.{i}.mlp_norm.weight": Rule("model.layers.{i}.post_attention_layernorm.weight"),
    **HF_MLP,
    "final_norm.weight": Rule("model.norm.weight"),
    "head.weight": Rule("lm_head.weight"),
}

# Gemma: post_attention_layernorm really is after attention, and every norm is stored minus one.
HF_GEMMA: Rules = {
    **HF_LLAMA,
    "layers.{i}.attn_norm.weight": Rule("model.layers.{i}.input_layernorm.weight", add=1.0),
    "layers.{i}.attn_post_norm.weight": Rule("model.layers.{i}.post_attention_layernorm.weight", add=1.0),
    "layers.{i}.mlp_norm.weight": Rule("model.layers.{i}.pre_feedforward_layernorm.weight", add=1.0),
    "layers.{i}.mlp_post_norm.weight": Rule("model.layers.{i}.post_feedforward_layernorm.weight", add=1.0),
    "layers.{i}.q_norm.weight": Rule("model.layers.{i}.self_attn.q_norm.weight", add=1.0),
    "layers.{i}.k_norm.weight": Rule("model.layers.{i}.self_attn.k_norm.weight", add=1.0),
    "final_norm.weight": Rule("model.norm.weight", add=1.0),
}

_GGUF_PARTS = {
    "attn_norm.weight": "attn_norm.weight",
    "q.weight": "attn_q.weight",
    "q.bias": "attn_q.bias",
    "k.weight": "attn_k.weight",
    "k.bias": "attn_k.bias",
    "v.weight": "attn_v.weight",
    "v.bias": "attn_v.bias",
    "o.weight": "attn_output.weight",
    "o.bias": "attn_output.bias",
    "q_norm.weight": "attn_q_norm.weight",
    "k_norm.weight": "attn_k_norm.weight",
    "attn_post_norm.weight": "post_attention_norm.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "gate.weight": "ffn_gate.weight",
    "gate.bias": "ffn_gate.bias",
    "up.weight": "ffn_up.weight",
    "up.bias": "ffn_up.bias",
    "down.weight": "ffn_down.weight",
    "down.bias": "ffn_down.bias",
    "router.weight": "ffn_gate_inp.weight",
    "experts.gate.weight": "ffn_gate_exps.weight",
    "experts.up.weight": "ffn_up_exps.weight",
    "experts.down.weight": "ffn_down_exps.weight",
    "mlp_post_norm.weight": "post_ffw_norm.weight",
}

GGUF: Rules = {
    "embed.weight": Rule("token_embd.weight"),
    **{f"layers.{{i}}.{ours}": Rule(f"blk.{{i}}.{theirs}") for ours, theirs in _GGUF_PARTS.items()},
    "final_norm.weight": Rule("output_norm.weight"),
    "head.weight": Rule("output.weight"),
}

# llama.cpp rotates neighbouring pairs for this architecture, so its converter reorders the rows of q and k.
GGUF_LLAMA: Rules = {
    **GGUF,
    **{
        f"layers.{{i}}.{part}.{kind}": replace(GGUF[f"layers.{{i}}.{part}.{kind}"], interleaved=True)
        for part in ("q", "k")
        for kind in ("weight", "bias")
    },
}

# Tensors that carry facts of the architecture, read into the spec rather than as weights.
GGUF_FACTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
