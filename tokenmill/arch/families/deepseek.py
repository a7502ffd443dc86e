"""DeepSeek V2 to V3.2, R1, Kimi K2, GLM-5, GLM-4.7-Flash, Moonlight: latent attention, and routed and shared experts
after a few dense layers.

V2 scores experts by a softmax over all; V3 by sigmoids, with a bias that affects only the choice, and groups of experts
of which the best are kept. The layer after the last one is an MTP head (`arch/mtp.py`).

V3.2 and GLM-5 attend to the tokens that an indexer selects; in GLM-5.2 most layers use the selection of an earlier
layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenmill.arch.families.qwen3_moe import HF_ROUTED
from tokenmill.arch.family import HF_NEXTN, Family, GGUFTraits, is_dense, refuse_others
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import EXPERTS as EXPERT_KEYS
from tokenmill.arch.gguf_config_keys import SIGMOID, SOFTMAX, ConfigKeys, yarn_keys
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.indexer import Indexer
from tokenmill.arch.spec import LayerSpec, Mla, MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import (
    GGUF,
    GGUF_LATENT,
    GGUF_LATENT_HEADS,
    GGUF_ROUTED,
    HF_LLAMA,
    HF_SHARED_EXPERTS,
    Rule,
    Rules,
)

HF_LATENT: Rules = {
    **HF_LLAMA,
    **HF_ROUTED,
    "layers.{i}.q.weight": Rule("model.layers.{i}.self_attn.q_proj.weight", interleaved=True),
    "layers.{i}.q_down.weight": Rule("model.layers.{i}.self_attn.q_a_proj.weight"),
    "layers.{i}.q_norm.weight": Rule("model.layers.{i}.self_attn.q_a_layernorm.weight"),
    "layers.{i}.q_up.weight": Rule("model.layers.{i}.self_attn.q_b_proj.weight", interleaved=True),
    "layers.{i}.kv_down.weight": Rule("model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight", interleaved=True),
    "layers.{i}.kv_norm.weight": Rule("model.layers.{i}.self_attn.kv_a_layernorm.weight"),
    "layers.{i}.kv_up.weight": Rule("model.layers.{i}.self_attn.kv_b_proj.weight"),
    "layers.{i}.choice_bias": Rule("model.layers.{i}.mlp.gate.e_score_correction_bias"),
    **HF_SHARED_EXPERTS,
}

INDEX = "model.layers.{i}.self_attn.indexer"
HF_INDEXED: Rules = {
    **HF_LATENT,
    "layers.{i}.index_q.weight": Rule(f"{INDEX}.wq_b.weight"),
    "layers.{i}.index_k.weight": Rule(f"{INDEX}.wk.weight"),
    "layers.{i}.index_k_norm.weight": Rule(f"{INDEX}.k_norm.weight"),
    "layers.{i}.index_k_norm.bias": Rule(f"{INDEX}.k_norm.bias"),
    "layers.{i}.index_weights.weight": Rule(f"{INDEX}.weights_proj.weight"),
}
HF_INTERLEAVED_INDEX: Rules = {
    **HF_INDEXED,
    **{
        f"layers.{{i}}.{part}": replace(HF_INDEXED[f"layers.{{i}}.{part}"], interleaved=True)
        for part in ("index_q.weight", "index_k.weight", "index_k_norm.weight", "index_k_norm.bias")
    },
}


def _experts(fields: ConfigFields, layer_index: int, routing: RoutingSpec) -> MoeSpec | None:
    if fields.integer("moe_layer_freq") != 1:
        fields.refuse("moe_layer_freq other than 1 is not implemented")
    if is_dense(fields, layer_index):
        return None
    width = fields.integer("moe_intermediate_size")
    num_shared = fields.integer_or_none("n_shared_experts", minimum=0) or 0
    return MoeSpec(
        num_experts=fields.integer("n_routed_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(width),
        routing=replace(routing, scale=fields.positive("routed_scaling_factor")),
        shared=MlpSpec(num_shared * width) if num_shared else None,
    )


def _experts_by_softmax(fields: ConfigFields, layer_index: int) -> MoeSpec | None:
    method = fields.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        fields.refuse(f"topk_method {method!r} is not implemented")
    routing = RoutingSpec(renormalize=False)
    if method == "group_limited_greedy":
        groups, kept = fields.integer("n_group"), fields.integer("topk_group")
        routing = replace(routing, num_groups=groups, kept_groups=kept, group_score="best")
    return _experts(fields, layer_index, routing)


def experts_by_sigmoid(fields: ConfigFields, layer_index: int) -> MoeSpec | None:
    for key, expected in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if fields.get(key) not in (None, expected):
            fields.refuse(f"{key} {fields.get(key)!r} is not implemented")
    routing = RoutingSpec(
        "sigmoid",
        renormalize=fields.flag("norm_topk_prob"),
        epsilon=1e-20,
        has_choice_bias=True,
        num_groups=fields.integer("n_group"),
        kept_groups=fields.integer("topk_group"),
    )
    return _experts(fields, layer_index, routing)


def _indexed(fields: ConfigFields, layer_index: int, layer: LayerSpec) -> LayerSpec:
    """Return the layer with an indexer, or with the selection of the last layer that has one."""
    mixer, kinds = layer.mixer, _index_kinds(fields)
    assert isinstance(mixer, Mla), "see `is_latent`"
    if mixer.q_rank is None:
        fields.refuse("an indexer without q_lora_rank is not possible")
    if kinds[layer_index] == "shared":
        earlier = [index for index, kind in enumerate(kinds[:layer_index]) if kind == "full"]
        if not earlier:
            fields.refuse("indexer_types: the first layer can't share an index")
        return replace(layer, mixer=replace(mixer, shares_index_of=earlier[-1]))
    heads, dim = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    if dim < mixer.rope_dim:
        fields.refuse(f"index_head_dim {dim} is less than qk_rope_head_dim {mixer.rope_dim}")
    return replace(layer, mixer=replace(mixer, indexer=Indexer(heads, dim, fields.integer("index_topk"))))


def _index_kinds(fields: ConfigFields) -> tuple[str, ...]:
    """Return "full" or "shared" for each layer, from any of the keys that can define it."""
    count, pattern = fields.integer("num_hidden_layers"), fields.get("index_topk_pattern")
    kinds = fields.strings("indexer_types", count)
    if kinds is None and isinstance(pattern, str):
        kinds = tuple({"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern)
    if kinds is None:
        every = fields.integer_or_none("index_topk_freq") or 1
        offset = fields.integer("index_skip_topk_offset", minimum=0)
        return tuple("shared" if max(index - offset + 1, 0) % every else "full" for index in range(count))
    if len(kinds) != count:
        fields.refuse(f"index_topk_pattern has {len(kinds)} letters for {count} layers")
    refuse_others(fields, kinds, "full", "shared")
    return kinds


def latent_config(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return the sizes of a head and the scaling.

    Newer files have the head sizes under `_mla` keys, because their attention keys describe the latent entries that all
    heads share. YaRN's two score factors are one value in GGUF files.
    """
    rope, ending = fields.integer("rope.dimension_count"), "_mla" if fields.has("attention.key_length_mla") else ""
    found: dict[str, Any] = {
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": fields.integer(f"attention.key_length{ending}") - rope,
        "v_head_dim": fields.integer(f"attention.value_length{ending}"),
        "q_lora_rank": fields.integer_or_none("attention.q_lora_rank"),
    }
    if fields.get("rope.scaling.type") == "yarn" and fields.has("rope.scaling.yarn_log_multiplier"):
        weight = round(10 * fields.positive("rope.scaling.yarn_log_multiplier"), 6)
        found["rope_scaling"] = {**yarn_keys(fields), "mscale": weight, "mscale_all_dim": weight}
    has_groups = (fields.integer_or_none("expert_group_count", minimum=0) or 1) > 1
    if has_groups and fields.get("expert_gating_func") in (None, SOFTMAX):
        found["topk_method"] = "group_limited_greedy"
    return found


LATENT_KEYS = {
    **EXPERT_KEYS,
    "kv_lora_rank": "attention.kv_lora_rank",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
NOT_OF_HEADS = ("head_dim", "partial_rotary_factor", "num_key_value_heads")
GGUF_DEEPSEEK: Rules = {**GGUF, **GGUF_LATENT, **GGUF_ROUTED}
GGUF_INDEX = "blk.{i}.indexer"
GGUF_GLM_DSA: Rules = {
    **GGUF_DEEPSEEK,
    "layers.{i}.index_q.weight": Rule(f"{GGUF_INDEX}.attn_q_b.weight", interleaved=True),
    "layers.{i}.index_k.weight": Rule(f"{GGUF_INDEX}.attn_k.weight", interleaved=True),
    "layers.{i}.index_k_norm.weight": Rule(f"{GGUF_INDEX}.k_norm.weight", interleaved=True),
    "layers.{i}.index_k_norm.bias": Rule(f"{GGUF_INDEX}.k_norm.bias", interleaved=True),
    "layers.{i}.index_weights.weight": Rule(f"{GGUF_INDEX}.proj.weight"),
}
INDEX_KEYS = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}


def _indexed_config(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return also which layers have their own indexer: those that the metadata lists, or that have its tensors."""
    count = fields.integer("block_count") - (fields.integer_or_none("nextn_predict_layers", minimum=0) or 0)
    types = fields.get("attention.indexer.types")
    if not isinstance(types, list):
        types = [f"blk.{index}.indexer.attn_k.weight" in gguf.tensors for index in range(count)]
    return latent_config(fields, gguf) | {"indexer_types": ["full" if one else "shared" for one in types[:count]]}


DEEPSEEK_KEYS = ConfigKeys(LATENT_KEYS, more=latent_config, without=NOT_OF_HEADS)

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    model_types=("deepseek_v2",),
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "topk_method": "greedy",
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": 1407,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    hf_rules=HF_LATENT,
    gguf=GGUFTraits(
        "deepseek2",
        GGUF_DEEPSEEK,
        config_keys=replace(DEEPSEEK_KEYS, gating=SOFTMAX),
        variant=GGUF_LATENT_HEADS,
        other_with=("expert_gating_func", "deepseek_v3"),
        other_value=SIGMOID,
    ),
    is_latent=True,
    experts=_experts_by_softmax,
    refused_flags=("attention_bias", "mlp_bias", "norm_topk_prob"),
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "kimi_k2"),
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 2048,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    hf_rules=HF_LATENT,
    gguf=GGUFTraits("deepseek2", GGUF_DEEPSEEK, config_keys=DEEPSEEK_KEYS, variant=GGUF_LATENT_HEADS),
    is_latent=True,
    experts=experts_by_sigmoid,
    refused_flags=("attention_bias", "mlp_bias", "index_n_heads"),
    mtp=HF_NEXTN,
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    model_types=("glm4_moe_lite",),
    defaults={
        **DEEPSEEK_V3.defaults,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 202752,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "moe_intermediate_size": 1536,
        "rms_norm_eps": 1e-5,
    },
)

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    model_types=("deepseek_v32",),
    defaults={
        **DEEPSEEK_V3.defaults,
        "max_position_embeddings": 163840,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_skip_topk_offset": 2,
    },
    hf_rules=HF_INDEXED,
    gguf=None,
    adjust_layer=_indexed,
    refused_flags=("attention_bias", "mlp_bias", "indexer_rope_interleave"),
)

GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    name="glm_moe_dsa",
    model_types=("glm_moe_dsa",),
    defaults={
        **DEEPSEEK_V32.defaults,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "max_position_embeddings": 202752,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "index_n_heads": 32,
    },
    hf_rules=HF_INTERLEAVED_INDEX,
    gguf=GGUFTraits(
        "glm-dsa",
        GGUF_GLM_DSA,
        config_keys=ConfigKeys({**LATENT_KEYS, **INDEX_KEYS}, more=_indexed_config, without=NOT_OF_HEADS),
        variant=GGUF_LATENT_HEADS,
    ),
    refused_flags=("attention_bias", "mlp_bias"),
)
