"""Layer outlines of models that the engine does not run, read from their configs (see `outlines.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.outline import (
    FeedOutline,
    LayerOutline,
    MixerOutline,
    gated,
    grouped_attention,
    layer,
    routed,
)

# ── grouped-query attention ───────────────────────────────────────────────────────────────────────

Layers = tuple[LayerOutline, ...]
Reader = Callable[[ConfigFields], Layers]


def phi_layers(fields: ConfigFields) -> Layers:
    """Phi-1.5 and 2: one norm (weight and bias) before attention and MLP, biases everywhere, an ungated MLP."""
    hidden, heads = fields.integer("n_embd"), fields.integer("n_head")
    inner = fields.integer_or_none("n_inner") or 4 * hidden
    mixer = grouped_attention(
        hidden, heads, fields.integer_or_none("n_head_kv") or heads, hidden // heads, qkv_bias=True, out_bias=True
    )
    feed = FeedOutline(linear=2 * hidden * inner, vectors=inner + hidden, width=2 * inner)
    return (layer(mixer, feed, 2 * hidden),) * fields.integer("n_layer")


# ── latent attention ───────────────────────────────────────────────────────────────────────────────


def latent_attention(fields: ConfigFields, hidden: int) -> MixerOutline:
    heads, rank = fields.integer("num_attention_heads"), fields.integer("kv_lora_rank")
    nope, rope, value = (fields.integer(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query, query_rank = heads * (nope + rope), fields.integer_or_none("q_lora_rank")
    to_queries = hidden * query_rank + query_rank * query if query_rank else hidden * query
    index_linear, index_vectors, index_kept = _indexer(fields, hidden, query_rank or hidden)
    to_latent, from_latent = hidden * (rank + rope), rank * heads * (nope + value)
    return MixerOutline(
        linear=to_queries + to_latent + from_latent + heads * value * hidden + index_linear,
        vectors=(query_rank or 0) + rank + index_vectors,
        kv_values=rank + rope + index_kept,
        pair_values=query + heads * value,
        num_heads=heads,
        num_kv_heads=1,  # one latent vector for all heads: a tensor split copies it
        width=2 * query + heads * (nope + value),
    )


def _indexer(fields: ConfigFields, hidden: int, query_rank: int) -> tuple[int, int, int]:
    """Return the (matrix values, vector values, cached values per token) of the indexer of sparse attention."""
    heads = fields.integer_or_none("index_n_heads")
    if heads is None:
        return 0, 0, 0
    width = fields.integer("index_head_dim")
    return query_rank * heads * width + hidden * (width + heads), 2 * width, width


# ── layers of several shapes ───────────────────────────────────────────────────────────────────────


def nemotron_nas_layers(fields: ConfigFields) -> Layers:
    """Nemotron NAS: each layer has an MLP of its own width, and some layers have no attention."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    blocks, count = fields.get("block_configs"), fields.integer("num_hidden_layers")
    if not isinstance(blocks, list) or len(blocks) != count:
        fields.refuse(f"block_configs has no entry for each of {count} layers")
    return tuple(_nemotron_nas_layer(fields, block, hidden, heads) for block in blocks)


def _nemotron_nas_layer(fields: ConfigFields, block: Any, hidden: int, heads: int) -> LayerOutline:
    own = block if isinstance(block, dict) else {}
    parts = [own[key] for key in ("attention", "ffn") if isinstance(own.get(key), dict)]
    if len(parts) < 2:
        fields.refuse("a block has no attention or ffn")
    attention, feed = (ConfigFields(part, "block_configs", {"no_op": False}) for part in parts)
    mixer, inner, norms = MixerOutline(linear=0), 0, 0
    if any(part.get("replace_with_linear") for part in (attention, feed) if part.has("replace_with_linear")):
        fields.refuse("a block is replaced by a matrix")
    if not attention.flag("no_op"):
        kv_heads = heads // attention.integer("n_heads_in_group")
        mixer, norms = grouped_attention(hidden, heads, kv_heads, hidden // heads), hidden
    if not feed.flag("no_op"):
        inner, norms = -(-int(feed.positive("ffn_mult") * 2 * hidden / 3) // 256) * 256, norms + hidden
    return layer(mixer, gated(hidden, inner), norms)


# ── the delta rule with gates of full rank ─────────────────────────────────────────────────────────


def kimi_k3_layers(fields: ConfigFields) -> Layers:
    """Kimi K3: recurrent layers with a decay per channel, gated latent attention without rotation, experts that work on
    a narrower projection of the stream."""
    hidden, count = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    linear = ConfigFields(fields.section("linear_attn_config") or {}, "linear_attn_config")
    full, dense = set(linear.integers("full_attn_layers")), fields.integer("first_k_dense_replace", minimum=0)
    attention, value = latent_attention(fields, hidden), fields.integer("v_head_dim")
    gates = hidden * fields.integer("num_attention_heads") * value
    mixers = _kimi_recurrent(linear, hidden), replace(attention, linear=attention.linear + gates)
    feeds = gated(hidden, fields.integer("intermediate_size")), _latent_experts(fields, hidden)
    return tuple(layer(mixers[index + 1 in full], feeds[index >= dense], 2 * hidden) for index in range(count))


def _kimi_recurrent(linear: ConfigFields, hidden: int) -> MixerOutline:
    heads, dim = linear.integer("num_heads"), linear.integer("head_dim")
    kernel, width = linear.integer("short_conv_kernel_size"), heads * dim
    decays = hidden * dim + dim * width
    gates = hidden * width if linear.has("use_full_rank_gate") and linear.flag("use_full_rank_gate") else decays
    return MixerOutline(
        linear=4 * hidden * width + decays + gates + hidden * heads,
        vectors=3 * kernel * width + width + heads + dim,
        num_heads=heads,
        num_kv_heads=heads,
        width=8 * width,
        state_values=heads * dim * dim + 3 * (kernel - 1) * width,
    )


def _latent_experts(fields: ConfigFields, hidden: int) -> FeedOutline:
    inner = fields.integer("moe_intermediate_size")
    latent = fields.integer_or_none("routed_expert_hidden_size")
    found = routed(
        latent or hidden,
        inner,
        fields.integer("num_experts"),
        fields.integer("num_experts_per_token"),
        has_router_bias=True,
    )
    shared = inner * (fields.integer_or_none("num_shared_experts", minimum=0) or 0)
    between = 2 * hidden * latent if latent else 0
    return replace(
        found,
        linear=hidden * fields.integer("num_experts") + 3 * hidden * shared + between,
        vectors=found.vectors + (latent or 0),
    )


LAYERS: dict[str, Reader] = {
    "kimi_k3": kimi_k3_layers,
    "nemotron-nas": nemotron_nas_layers,
    "phi-msft": phi_layers,
}
