"""DeepSeek V4: attention over a window and compressed entries, several residual streams, experts that are looked up by
token id in the first layers and scored by the square root of softplus in the others. Its MTP heads, which have their
own tensor names, are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.compressed import Compression
from tokenmill.arch.family import Family, Windows, refuse_others
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.indexer import Indexer
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, MoeSpec, RoutingSpec, WindowedMqa
from tokenmill.arch.streams import HyperConnections
from tokenmill.arch.tensors import Rule, Rules

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS_BY_RATE = {0: SLIDING, 4: SPARSE, 128: HEAVY}
RATES = {SPARSE: 4, HEAVY: 128}
LIMIT = 10.0  # of activations


def _common_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a config to the keys of newer files: layer types, their rates, and a rotation per type."""
    found = {**config, "intermediate_size": config.get("moe_intermediate_size")}
    count, ratios = config.get("num_hidden_layers"), config.get("compress_ratios")
    if "layer_types" not in config and isinstance(ratios, list):
        found["layer_types"] = [KINDS_BY_RATE.get(ratio, str(ratio)) for ratio in ratios[:count]]
    if "mlp_layer_types" not in config and isinstance(count, int):
        hashed = config.get("num_hash_layers", 3)
        found["mlp_layer_types"] = ["hash_moe" if number < hashed else "moe" for number in range(count)]
    found["rope_parameters"] = _ropes(config)
    return found


def _ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the two rotations: that of layers with only a window, and that of layers with compressed entries."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = config.get("partial_rotary_factor")
    if share is None and config.get("qk_rope_head_dim") and config.get("head_dim"):
        share = config["qk_rope_head_dim"] / config["head_dim"]
    common = {"partial_rotary_factor": share if share is not None else 64 / 512}
    main = {"rope_theta": config.get("rope_theta", 10000.0), **common}
    other = {**scaling, "rope_theta": config.get("compress_rope_theta", 160000.0), **common}
    if isinstance(scaling.get("main"), dict) and isinstance(scaling.get("compress"), dict):
        main, other = scaling["main"], scaling["compress"]
    if "yarn" in (other.get("rope_type"), other.get("type")):
        other = {"attention_factor": 1.0, **other}
    return {SLIDING: main, "full_attention": other}


def _windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Return windows for the layers without compressed entries, which selects one of the two rotations."""
    window = fields.integer("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in _kinds(fields, num_layers))


def _kinds(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    kinds = fields.strings("layer_types", num_layers)
    if kinds is None:
        fields.refuse("layer_types is missing")
    refuse_others(fields, kinds, SLIDING, SPARSE, HEAVY)
    return kinds


def _layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    mixer = layer.mixer
    assert isinstance(mixer, Gqa) and mixer.rope is not None
    kind, heads, groups = _kinds(fields, fields.integer("num_hidden_layers"))[index], mixer.num_heads, 1
    if mixer.num_kv_heads != 1:
        fields.refuse(f"num_key_value_heads {mixer.num_kv_heads} is not implemented: all heads share one key")
    groups, eps = fields.integer("o_groups"), fields.positive("rms_norm_eps")
    if heads % groups:
        fields.refuse(f"num_attention_heads {heads} is not a multiple of o_groups {groups}")
    windowed = WindowedMqa(
        heads,
        mixer.head_dim,
        fields.integer("q_lora_rank"),
        fields.integer("sliding_window"),
        mixer.head_dim**-0.5,
        mixer.rope,
        groups,
        fields.integer("o_lora_rank"),
        eps,
        _compression(fields, kind, mixer.head_dim),
    )
    rounds = fields.integer("hc_sinkhorn_iters")
    streams = HyperConnections(fields.integer("hc_mult", minimum=2), rounds, fields.positive("hc_eps"), eps)
    return replace(layer, mixer=windowed, mlp=_experts(fields, index), streams=streams)


def _compression(fields: ConfigFields, kind: str, head_dim: int) -> Compression | None:
    if kind == SLIDING:
        return None
    rates = ConfigFields({**RATES, **(fields.section("compress_rates") or {})}, f"{fields.source} compress_rates")
    rate, indexer = rates.integer(kind, minimum=2), None
    if kind == SPARSE:
        keys = ("index_n_heads", "index_head_dim", "index_topk")
        indexer = Indexer(*(fields.integer(key) for key in keys))
    for what, size in (("head_dim", head_dim), ("index_head_dim", indexer.head_dim if indexer else rate)):
        if size % rate:
            fields.refuse(f"{what} {size} is not a multiple of the rate {rate} at which {kind} compresses")
    return Compression(rate, overlaps=kind == SPARSE, indexer=indexer)


def _experts(fields: ConfigFields, index: int) -> MoeSpec:
    kinds = fields.strings("mlp_layer_types", fields.integer("num_hidden_layers")) or ()
    refuse_others(fields, kinds, "hash_moe", "moe")
    if fields.text("scoring_func") != "sqrtsoftplus":
        fields.refuse(f"scoring_func {fields.get('scoring_func')!r} is not implemented")
    if fields.positive("swiglu_limit") != LIMIT:
        fields.refuse(f"a swiglu_limit other than {LIMIT:g} is not implemented")
    if fields.text("hidden_act") != "silu" or not fields.flag("norm_topk_prob"):
        fields.refuse("hidden_act other than silu, or norm_topk_prob false, is not implemented")
    is_looked_up = kinds[index] == "hash_moe"
    expert = MlpSpec(fields.integer("moe_intermediate_size"), "silu_to_10")
    return MoeSpec(
        fields.integer("n_routed_experts"),
        fields.integer("num_experts_per_tok"),
        expert,
        RoutingSpec(
            "sqrt_softplus",
            epsilon=1e-20,
            has_choice_bias=not is_looked_up,
            scale=fields.positive("routed_scaling_factor"),
            table_rows=fields.integer("vocab_size") if is_looked_up else 0,
        ),
        shared=replace(expert, intermediate_size=expert.intermediate_size * fields.integer("n_shared_experts")),
    )


def _rules(prefix: str, kv_norm: str, ends: Mapping[str, str]) -> Rules:
    layer = f"{prefix}layers.{{i}}"
    attention, feed, compressor = f"{layer}.attn", f"{layer}.ffn", f"{layer}.attn.compressor"
    index = f"{layer}.attn.indexer"
    matrices = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    named = {
        "attn_norm.weight": f"{layer}.attn_norm.weight",
        "mlp_norm.weight": f"{layer}.ffn_norm.weight",
        "q_down.weight": f"{attention}.wq_a.weight",
        "q_norm.weight": f"{attention}.q_norm.weight",
        "q_up.weight": f"{attention}.wq_b.weight",
        "kv.weight": f"{attention}.wkv.weight",
        "kv_norm.weight": f"{attention}.{kv_norm}.weight",
        "sinks": f"{attention}.attn_sink",
        "out_groups.weight": f"{attention}.wo_a.weight",
        "o.weight": f"{attention}.wo_b.weight",
        "entry_values.weight": f"{compressor}.wkv.weight",
        "entry_gates.weight": f"{compressor}.wgate.weight",
        "entry_bias": f"{compressor}.ape",
        "entry_norm.weight": f"{compressor}.norm.weight",
        "index_values.weight": f"{index}.compressor.wkv.weight",
        "index_gates.weight": f"{index}.compressor.wgate.weight",
        "index_bias": f"{index}.compressor.ape",
        "index_norm.weight": f"{index}.compressor.norm.weight",
        "index_weights.weight": f"{index}.weights_proj.weight",
        "index_q.weight": f"{index}.wq_b.weight",
        "router.weight": f"{feed}.gate.weight",
        "choice_bias": f"{feed}.gate.bias",
        "expert_table": f"{feed}.gate.tid2eid",
        **{f"experts.{ours}.weight": f"{feed}.experts.{{e}}.{theirs}.weight" for ours, theirs in matrices},
        **{f"shared.{ours}.weight": f"{feed}.shared_experts.{theirs}.weight" for ours, theirs in matrices},
    }
    for ours, theirs in (("attn", "attn"), ("mlp", "ffn")):
        for part, name in ((".weight", "fn"), ("_base", "base"), ("_scale", "scale")):
            named[f"{ours}_connect{part}"] = f"{layer}.hc_{theirs}_{name}"
    return {
        **{f"layers.{{i}}.{ours}": Rule(theirs) for ours, theirs in named.items()},
        **{ours: Rule(theirs) for ours, theirs in ends.items()},
    }


DEEPSEEK_V4 = Family(
    name="deepseek_v4",
    model_types=("deepseek_v4", "deepseek_ref"),
    defaults={
        "hidden_act": "silu",
        "head_dim": 512,
        "num_key_value_heads": 1,
        "q_lora_rank": 1024,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": LIMIT,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    hf_rules=_rules(
        "model.",
        "norm",
        {
            "embed.weight": "model.embed_tokens.weight",
            "final_norm.weight": "model.norm.weight",
            "head.weight": "head.weight",
            "streams_end.weight": "model.hc_head.hc_fn",
            "streams_end_base": "model.hc_head.hc_base",
            "streams_end_scale": "model.hc_head.hc_scale",
        },
    ),
    # The names in published files; those above are written by transformers.
    hf_variant=_rules(
        "",
        "kv_norm",
        {
            "embed.weight": "embed.weight",
            "final_norm.weight": "norm.weight",
            "head.weight": "head.weight",
            "streams_end.weight": "hc_head_fn",
            "streams_end_base": "hc_head_base",
            "streams_end_scale": "hc_head_scale",
        },
    ),
    has_partial_rotary=True,
    windows=_windows,
    adjust_layer=_layer,
    common_keys=_common_keys,
    refused_flags=("attention_bias", "mlp_bias"),
    ignored_prefixes=("mtp.", "model.mtp."),
)
