"""Outlines of models that the engine does not run: enough to say what they need, by the words of their configs.

A family that the engine learns to run leaves this table by itself: its `ModelSpec` is preferred. Of models that also
see or hear, the part that reads and writes text is outlined.

Latent attention (MLA, DeepSeek's line): a token leaves behind one latent vector and one rotated key for all heads
together, and with sparse attention (V3.2, GLM-5) the indexer's key. Attention is counted as if every query saw all
keys, sparse or not: an upper bound. Heads that predict further tokens ahead (MTP) are not counted; model cards leave
them out too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenmill.arch.families import BY_MODEL_TYPE
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.hf_config import MAX_LAYERS, spec_from_hf
from tokenmill.arch.outline import (
    FeedOutline,
    LayerOutline,
    MixerOutline,
    Model,
    ModelOutline,
    gated,
    grouped_attention,
    layer,
    routed,
)
from tokenmill.errors import UnsupportedModel

# ── grouped-query attention ───────────────────────────────────────────────────────────────────────


Layers = tuple[LayerOutline, ...]


def phi_layers(fields: ConfigFields) -> Layers:
    """One norm (weight and bias) before both halves, biases everywhere, an MLP without gate."""
    hidden, heads = fields.integer("n_embd"), fields.integer("n_head")
    inner = fields.integer_or_none("n_inner") or 4 * hidden
    mixer = grouped_attention(
        hidden, heads, fields.integer_or_none("n_head_kv") or heads, hidden // heads, qkv_bias=True, out_bias=True
    )
    feed = FeedOutline(linear=2 * hidden * inner, vectors=inner + hidden, width=2 * inner)
    return (layer(mixer, feed, 2 * hidden),) * fields.integer("n_layer")


# ── latent attention ───────────────────────────────────────────────────────────────────────────────


def latent_layers(fields: ConfigFields) -> tuple[LayerOutline, ...]:
    hidden, dense = fields.integer("hidden_size"), fields.integer("first_k_dense_replace", minimum=0)
    if fields.integer("moe_layer_freq") != 1:
        fields.refuse("moe_layer_freq other than 1 is not known")
    attention = latent_attention(fields, hidden)
    early = layer(attention, gated(hidden, fields.integer("intermediate_size")), 2 * hidden)
    late = layer(attention, deepseek_experts(fields), 2 * hidden)
    return tuple(early if index < dense else late for index in range(fields.integer("num_hidden_layers")))


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
    """(matrices, vectors, values kept per token) of what chooses the keys that sparse attention looks at."""
    heads = fields.integer_or_none("index_n_heads")
    if heads is None:
        return 0, 0, 0
    width = fields.integer("index_head_dim")
    return query_rank * heads * width + hidden * (width + heads), 2 * width, width


def deepseek_experts(fields: ConfigFields) -> FeedOutline:
    hidden, inner = fields.integer("hidden_size"), fields.integer("moe_intermediate_size")
    shared = inner * (fields.integer_or_none("n_shared_experts", minimum=0) or 0)
    return routed(
        hidden, inner, fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok"), shared=shared
    )


# ── the table ──────────────────────────────────────────────────────────────────────────────────────


Reader = Callable[[ConfigFields], tuple[LayerOutline, ...]]

LAYERS: dict[str, Reader] = {"kimi_k25": latent_layers, "phi-msft": phi_layers}
SAME_TEXT_MODEL = {"qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
# What keeps the engine from running a model_type that it knows of.
MISSING = {
    "bailing_hybrid": "linear attention beside latent attention",
    "kimi_k3": "recurrent layers with a decay per channel, gated latent attention",
    "mamba": "recurrent layers without attention",
    "mimo_v2_flash": "keys and values of different widths beside windows of other shapes",
    "minimax_m3": "attention over chosen blocks of keys",
    "minimax_m3_vl": "attention over chosen blocks of keys",
    "nemotron-nas": "layers that differ in their sizes, or lack attention",
    "phi-msft": "GPT-2's names for everything (the same model as `phi` has ours)",
    "phi3_v": "a picture part that the file has no names of ours for",
    "step3p7": "gates per head, limits of activations that differ between layers",
}
DEFAULTS = {
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}


def outline_from_hf(config: Mapping[str, Any]) -> Model:
    """A config as what can be planned with: a spec where the engine runs the model, an outline elsewhere."""
    model_type = str(config.get("model_type"))
    if model_type in BY_MODEL_TYPE:
        return spec_from_hf(config)
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, dict) else dict(config)
    if model_type in SAME_TEXT_MODEL:
        return spec_from_hf({**_without_parts(merged), "model_type": SAME_TEXT_MODEL[model_type]})
    if model_type not in LAYERS:
        known = ", ".join(sorted([*BY_MODEL_TYPE, *SAME_TEXT_MODEL, *LAYERS]))
        raise UnsupportedModel(f"model_type {model_type!r} is not known", hint=f"these are: {known}")
    return _outline(ConfigFields(merged, model_type, DEFAULTS), model_type)


def _without_parts(config: dict[str, Any]) -> dict[str, Any]:
    """The config without what does not change sizes: how positions of pictures are rotated."""
    dropped = ("text_config", "architectures", "rope_scaling", "rope_parameters")
    return {"rope_theta": 10000.0, **{key: value for key, value in config.items() if key not in dropped}}


def _outline(fields: ConfigFields, family: str) -> ModelOutline:
    is_phi = family == "phi-msft"
    if fields.integer("n_layer" if is_phi else "num_hidden_layers") > MAX_LAYERS:
        fields.refuse(f"more than {MAX_LAYERS} layers")
    if is_phi:
        return _phi(fields)
    hidden, layers = fields.integer("hidden_size"), LAYERS[family](fields)
    if not 0 < len(layers) <= MAX_LAYERS:
        fields.refuse(f"{len(layers)} layers")
    for one in layers:
        if one.num_active > one.num_experts:
            fields.refuse(f"{one.num_active} experts a token are not possible with {one.num_experts}")
    return ModelOutline(
        family,
        fields.integer("vocab_size"),
        hidden,
        layers,
        fields.flag("tie_word_embeddings"),
        fields.integer("max_position_embeddings"),
        end_vectors=hidden,
    )


def _phi(fields: ConfigFields) -> ModelOutline:
    """Phi-1.5 and Phi-2 name everything in GPT-2's words; their head has a bias."""
    hidden, vocab = fields.integer("n_embd"), fields.integer("vocab_size")
    return ModelOutline(
        "phi-msft",
        vocab,
        hidden,
        phi_layers(fields),
        fields.flag("tie_word_embeddings"),
        fields.integer("n_positions"),
        "float16",
        2 * hidden + vocab,
    )
