"""Models of grouped-query attention with experts, each in its own words: gpt-oss, Llama 4, GLM-4.5, MiniMax-M2; and
Phi-2, whose layers compute attention and MLP side by side."""

from __future__ import annotations

from typing import Any

from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.outline import LayerOutline
from tokenmill.arch.outlines.latent import deepseek_experts
from tokenmill.arch.outlines.parts import FeedOutline, MixerOutline, gated, grouped_attention, layer, routed
from tokenmill.arch.windows import every_layer

Layers = tuple[LayerOutline, ...]


def attention(fields: ConfigFields, **details: Any) -> MixerOutline:
    """In the words of most configs; `details` as `grouped_attention` takes them."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer_or_none("num_key_value_heads") or heads
    head_dim = fields.integer_or_none("head_dim") or hidden // heads
    return grouped_attention(hidden, heads, kv_heads, head_dim, **details)


def gpt_oss_layers(fields: ConfigFields) -> Layers:
    """Windows on every other layer, a sink per head, biases everywhere, experts included."""
    hidden, inner, heads = (fields.integer(k) for k in ("hidden_size", "intermediate_size", "num_attention_heads"))
    feed = routed(
        hidden, inner, fields.integer("num_local_experts"), fields.integer("num_experts_per_tok"),
        biases=2 * inner + hidden, has_router_bias=True,
    )  # fmt: skip
    windows = every_layer(fields, fields.integer("num_hidden_layers"))
    mixers = {
        window: attention(fields, qkv_bias=True, out_bias=True, norms=heads, window=window) for window in set(windows)
    }
    return tuple(layer(mixers[window], feed, 2 * hidden) for window in windows)


def llama4_layers(fields: ConfigFields) -> Layers:
    """Three of four layers look back within a chunk only; every `interleave_moe_layer_step`-th has experts."""
    hidden, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
    sparse = routed(
        hidden, inner, fields.integer("num_local_experts"), fields.integer("num_experts_per_tok"), shared=inner
    )
    dense = gated(hidden, fields.integer("intermediate_size_mlp"))
    step = fields.integer("interleave_moe_layer_step")
    return tuple(
        layer(
            attention(fields, window=None if (index + 1) % 4 == 0 else fields.integer("attention_chunk_size")),
            sparse if (index + 1) % step == 0 else dense,
            2 * hidden,
        )
        for index in range(fields.integer("num_hidden_layers"))
    )


def qwen_experts(fields: ConfigFields) -> FeedOutline:
    """A gated expert that every token passes beside the routed ones."""
    hidden, shared = fields.integer("hidden_size"), fields.integer("shared_expert_intermediate_size")
    feed = routed(
        hidden, fields.integer("moe_intermediate_size"), fields.integer("num_experts"),
        fields.integer("num_experts_per_tok"), shared=shared,
    )  # fmt: skip
    return FeedOutline(feed.linear + hidden, feed.vectors, feed.width, feed.experts, feed.num_experts, feed.num_active)


def glm4_moe_layers(fields: ConfigFields) -> Layers:
    hidden, dense = fields.integer("hidden_size"), fields.integer("first_k_dense_replace", minimum=0)
    norms = 2 * fields.integer("head_dim") if fields.flag("use_qk_norm") else 0
    mixer = attention(fields, qkv_bias=fields.flag("attention_bias"), norms=norms)
    early = layer(mixer, gated(hidden, fields.integer("intermediate_size")), 2 * hidden)
    late = layer(mixer, deepseek_experts(fields), 2 * hidden)
    return tuple(early if index < dense else late for index in range(fields.integer("num_hidden_layers")))


def minimax_m2_layers(fields: ConfigFields) -> Layers:
    """Norms over all queries and over all keys of a layer."""
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads") + fields.integer("num_key_value_heads")
    mixer = attention(fields, norms=heads * fields.integer("head_dim"))
    feed = routed(
        hidden, fields.integer("intermediate_size"), fields.integer("num_local_experts"),
        fields.integer("num_experts_per_tok"),
    )  # fmt: skip
    return (layer(mixer, feed, 2 * hidden),) * fields.integer("num_hidden_layers")


def phi_layers(fields: ConfigFields) -> Layers:
    """One norm (weight and bias) before both halves, biases everywhere, an MLP without gate."""
    hidden, heads = fields.integer("n_embd"), fields.integer("n_head")
    inner = fields.integer_or_none("n_inner") or 4 * hidden
    mixer = grouped_attention(
        hidden, heads, fields.integer_or_none("n_head_kv") or heads, hidden // heads, qkv_bias=True, out_bias=True
    )
    feed = FeedOutline(linear=2 * hidden * inner, vectors=inner + hidden, width=2 * inner)
    return (layer(mixer, feed, 2 * hidden),) * fields.integer("n_layer")
