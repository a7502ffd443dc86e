"""Models whose layers mostly keep a state instead of keys and values: Qwen3.5 (gated delta rule), Nemotron-H (Mamba-2).

A state has one size however long the context is, so it is a cost per request, not per token.
"""

from __future__ import annotations

from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.outline import LayerOutline
from tokenmill.arch.outlines.grouped import attention, qwen_experts
from tokenmill.arch.outlines.parts import NOTHING_FED, NOTHING_MIXED, FeedOutline, MixerOutline, gated, layer, routed

Layers = tuple[LayerOutline, ...]


def qwen35_layers(fields: ConfigFields) -> Layers:
    """Three layers of the delta rule, then one of attention with gates; unless the config says it layer by layer."""
    hidden, count = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    feed = qwen_experts(fields) if fields.has("num_experts") else gated(hidden, fields.integer("intermediate_size"))
    full = layer(attention(fields, norms=2 * fields.integer("head_dim"), gates=True), feed, 2 * hidden)
    linear = layer(delta_rule(fields, hidden), feed, 2 * hidden)
    every = fields.integer("full_attention_interval")
    kinds = fields.words("layer_types", count)
    is_full = [kind == "full_attention" for kind in kinds] if kinds else [n % every == 0 for n in range(1, count + 1)]
    return tuple(full if one else linear for one in is_full)


def delta_rule(fields: ConfigFields, hidden: int) -> MixerOutline:
    key_heads, heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    key_dim, value_dim = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    keys, values = key_heads * key_dim, heads * value_dim
    mixed, kernel = 2 * keys + values, fields.integer("linear_conv_kernel_dim")
    return MixerOutline(
        linear=hidden * (mixed + values + 2 * heads) + values * hidden,
        vectors=mixed * kernel + 2 * heads + value_dim,
        num_heads=heads,
        num_kv_heads=key_heads,
        width=mixed + 2 * values,
        state_values=heads * key_dim * value_dim + mixed * kernel,
    )


def nemotron_layers(fields: ConfigFields) -> Layers:
    """A letter each: M a state, * attention, E experts, - an MLP; every layer has one norm."""
    hidden = fields.integer("hidden_size")
    made = {
        "M": lambda: layer(mamba(fields, hidden), NOTHING_FED, hidden),
        "*": lambda: layer(attention(fields), NOTHING_FED, hidden),
        "E": lambda: layer(NOTHING_MIXED, nemotron_experts(fields, hidden), hidden),
        "-": lambda: layer(NOTHING_MIXED, _plain(hidden, fields.integer("intermediate_size")), hidden),
    }
    pattern = fields.text("hybrid_override_pattern")
    if set(pattern) - set(made):
        fields.refuse(f"hybrid_override_pattern has letters other than {' '.join(made)}")
    known = {letter: made[letter]() for letter in set(pattern)}
    return tuple(known[letter] for letter in pattern)


def _plain(hidden: int, inner: int) -> FeedOutline:
    return FeedOutline(linear=2 * hidden * inner, width=2 * inner)


def mamba(fields: ConfigFields, hidden: int) -> MixerOutline:
    heads, head_dim, state = (fields.integer(k) for k in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"))
    inner, kernel = heads * head_dim, fields.integer("conv_kernel")
    mixed = inner + 2 * fields.integer("n_groups") * state
    return MixerOutline(
        linear=hidden * (inner + mixed + heads) + inner * hidden,
        vectors=mixed * (kernel + 1) + 3 * heads + inner,
        num_heads=heads,
        num_kv_heads=fields.integer("n_groups"),
        width=2 * inner + mixed,
        state_values=inner * state + mixed * kernel,
    )


def nemotron_experts(fields: ConfigFields, hidden: int) -> FeedOutline:
    latent = fields.integer_or_none("moe_latent_size")
    if latent:
        fields.refuse("experts in a latent space are not known")
    shared = fields.integer("moe_shared_expert_intermediate_size") * fields.integer("n_shared_experts")
    return routed(
        hidden, fields.integer("moe_intermediate_size"), fields.integer("n_routed_experts"),
        fields.integer("num_experts_per_tok"), shared=shared, matrices=2,
    )  # fmt: skip
