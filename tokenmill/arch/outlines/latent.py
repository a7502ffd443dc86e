"""DeepSeek's line: attention through a latent vector (MLA), experts from the second or fourth layer on.

A token leaves behind one latent vector and one rotated key for all heads together, and with sparse attention (V3.2,
GLM-5) the indexer's key. Attention is counted as if every query saw all keys, sparse or not: an upper bound. Heads that
predict further tokens ahead (MTP) are not counted; model cards leave them out too.
"""

from __future__ import annotations

from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.outline import LayerOutline
from tokenmill.arch.outlines.parts import FeedOutline, MixerOutline, gated, layer, routed


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
