"""ERNIE 4.5, dense and with experts: rotation of neighbouring pairs; routed experts with softmax scores and a choice
bias, and shared experts."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.qwen3_moe import HF_ROUTED
from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import GGUF_LLAMA, HF_LLAMA, HF_SHARED_EXPERTS, Rule, interleaved_pairs

ERNIE4_5 = Family(
    name="ernie4_5",
    model_types=("ernie4_5",),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    hf_rules=interleaved_pairs(HF_LLAMA),
    gguf=GGUFTraits("ernie4_5", GGUF_LLAMA, config_keys=ConfigKeys(tensors={"use_bias": "blk.0.attn_q.bias"})),
    qkv_bias="use_bias",
    out_bias="use_bias",
    mlp_bias="use_bias",
)


def _experts(fields: ConfigFields, layer: int) -> MoeSpec | None:
    first, interval = fields.integer("moe_layer_start_index", minimum=0), fields.integer("moe_layer_interval")
    last = fields.integer("moe_layer_end_index", minimum=-1)
    if last == -1:
        last = fields.integer("num_hidden_layers") - 1
    if not first <= layer <= last or (layer + 1) % interval:
        return None
    inner, shared = fields.integer("moe_intermediate_size"), fields.integer("moe_num_shared_experts", minimum=0)
    return MoeSpec(
        num_experts=fields.integer("moe_num_experts"),
        num_active=fields.integer("moe_k"),
        expert=MlpSpec(inner, bias=fields.flag("use_bias")),
        routing=RoutingSpec(has_choice_bias=True),
        shared=MlpSpec(inner * shared, bias=fields.flag("use_bias")) if shared else None,
    )


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="ernie4_5_moe",
    model_types=("ernie4_5_moe",),
    defaults={
        **ERNIE4_5.defaults,
        "num_key_value_heads": 4,
        "head_dim": None,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    hf_rules={
        **interleaved_pairs(HF_LLAMA),
        **HF_ROUTED,
        **HF_SHARED_EXPERTS,
        "layers.{i}.choice_bias": Rule("model.layers.{i}.mlp.moe_statics.e_score_correction_bias", unit_axis=0),
    },
    gguf=None,
    experts=_experts,
    ignored_prefixes=("model.mtp_",),
)
