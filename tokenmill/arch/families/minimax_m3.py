"""MiniMax-M3, text part: attention over the blocks of keys that an indexer selects, norms on heads of q and k, rotation
of half of each head, gates with a limit, experts with sigmoid scores and a choice bias after three dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.gpt_oss import ALPHA, LIMIT
from tokenmill.arch.family import Family
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.indexer import BlockIndexer
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import HF_LLAMA, HF_QK_NORM, Rule, Rules

SPARSE, FULL = "minimax_m3_sparse", "full_attention"
INDEX_KEYS = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
EXPECTED = {
    "attention_output_gate": False,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "n_shared_experts": 1,
}
BLOCK = "model.layers.{i}.block_sparse_moe."


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate the keys of published files: a flag per layer, and a section about the indexer."""
    found, sparse = dict(config), config.get("sparse_attention_config")
    if isinstance(sparse, dict):
        found |= {ours: sparse[theirs] for ours, theirs in INDEX_KEYS.items() if theirs in sparse}
        flags = sparse.get("sparse_attention_freq")
        if isinstance(flags, list) and found.get("layer_types") is None:
            found["layer_types"] = [SPARSE if flag else FULL for flag in flags]
        others = {"sparse_init_block": 0, "sparse_score_type": "max", "use_sparse_attention": True}
        found["sparse_variant"] = {key: sparse[key] for key, usual in others.items() if sparse.get(key, usual) != usual}
    flags = config.get("moe_layer_freq")
    if isinstance(flags, list) and found.get("mlp_layer_types") is None:
        found["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in flags]
    if found.get("hidden_act") == "swigluoai":  # computed for every MLP, whatever the name says
        found["hidden_act"] = "silu"
    rotary, dim = config.get("rotary_dim"), config.get("head_dim")
    if isinstance(rotary, int) and isinstance(dim, int) and dim and "rope_parameters" not in config:
        found.setdefault("partial_rotary_factor", rotary / dim)
    return found


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    for key, expected in EXPECTED.items():
        if fields.get(key) not in (None, expected):
            fields.refuse(f"{key} {fields.get(key)!r} is not implemented")
    kinds = fields.strings("layer_types", fields.integer("num_hidden_layers"))
    if kinds is None or kinds[layer] == FULL:
        return attention
    if kinds[layer] != SPARSE:
        fields.refuse(f"layer type {kinds[layer]!r} is not implemented")
    return replace(attention, block_indexer=_indexer(fields, attention))


def _indexer(fields: ConfigFields, attention: Gqa) -> BlockIndexer:
    if fields.get("sparse_variant"):
        fields.refuse(f"sparse_attention_config {fields.get('sparse_variant')} is not implemented")
    indexer = BlockIndexer(
        num_heads=fields.integer("index_n_heads"),
        head_dim=fields.integer("index_head_dim"),
        block_size=fields.integer("index_block_size"),
        top_k=fields.integer("index_topk_blocks"),
        num_local=fields.integer("index_local_blocks", minimum=0),
    )
    if indexer.num_heads != attention.num_kv_heads:
        fields.refuse(
            f"{indexer.num_heads} index heads for {attention.num_kv_heads} key/value heads are not implemented"
        )
    if attention.rope is not None and attention.rope.rotary_dim > indexer.head_dim:
        fields.refuse(
            f"a rotation of {attention.rope.rotary_dim} of {indexer.head_dim} index dimensions is not possible"
        )
    if indexer.num_local > indexer.top_k:
        fields.refuse(f"{indexer.num_local} local blocks of {indexer.top_k} are not possible")
    return indexer


def _experts(fields: ConfigFields, layer: int) -> MoeSpec | None:
    kinds = fields.strings("mlp_layer_types", fields.integer("num_hidden_layers"))
    if kinds is not None and kinds[layer] == "dense":
        return None
    if fields.positive("swiglu_limit") != LIMIT or fields.positive("swiglu_alpha") != ALPHA:
        fields.refuse(f"swiglu_limit and swiglu_alpha other than {LIMIT:g} and {ALPHA:g} are not implemented")
    return MoeSpec(
        num_experts=fields.integer("num_local_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(fields.integer("intermediate_size"), "swiglu_oai"),
        routing=RoutingSpec("sigmoid", has_choice_bias=True, scale=fields.positive("routed_scaling_factor")),
        shared=MlpSpec(fields.integer("shared_intermediate_size"), "swiglu_oai"),
    )


def _adjust_layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    if not isinstance(layer.mlp, MlpSpec):
        return layer
    return replace(layer, mlp=MlpSpec(fields.integer("dense_intermediate_size"), "swiglu_oai"))


MINIMAX_M3_NAMES: Rules = {
    **{name: replace(rule, add=1.0) if "norm" in name else rule for name, rule in {**HF_LLAMA, **HF_QK_NORM}.items()},
    "layers.{i}.router.weight": Rule(BLOCK + "gate.weight"),
    "layers.{i}.choice_bias": Rule(BLOCK + "e_score_correction_bias"),
    "layers.{i}.experts.gate.weight": Rule(BLOCK + "experts.{e}.w1.weight"),
    "layers.{i}.experts.up.weight": Rule(BLOCK + "experts.{e}.w3.weight"),
    "layers.{i}.experts.down.weight": Rule(BLOCK + "experts.{e}.w2.weight"),
    **{
        f"layers.{{i}}.shared.{part}.weight": Rule(f"{BLOCK}shared_experts.{part}_proj.weight")
        for part in ("gate", "up", "down")
    },
    **{
        f"layers.{{i}}.index_{part}.weight": Rule(f"model.layers.{{i}}.self_attn.index_{part}_proj.weight")
        for part in ("q", "k")
    },
    **{
        f"layers.{{i}}.index_{part}_norm.weight": Rule(
            f"model.layers.{{i}}.self_attn.index_{part}_norm.weight", add=1.0
        )
        for part in ("q", "k")
    },
}

MINIMAX_M3 = Family(
    name="minimax_m3",
    model_types=("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "tie_word_embeddings": False,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.0,
        "swiglu_limit": LIMIT,
        "swiglu_alpha": ALPHA,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "index_local_blocks": 1,
        "bos_token_id": 200034,
        "eos_token_id": 200020,
    },
    hf_rules=MINIMAX_M3_NAMES,
    qk_norm="head",
    has_partial_rotary=True,
    experts=_experts,
    adjust_attention=_adjust_attention,
    adjust_layer=_adjust_layer,
    common_keys=_common_keys,
    refused_flags=("attention_bias",),
    hf_prefixes=("language_model.model.", "model.language_model.", "model."),
    ignored_prefixes=("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.", "mtp.", "model.mtp."),
)
