"""gpt-oss: a learned sink in every head's softmax, windows in every other layer, biases on everything, experts with
clamped gates; YaRN without truncation. Published files keep the experts' matrices in MXFP4, and so does the engine."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.family import Family, GGUFTraits, alternating
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import EXPERTS as EXPERT_KEYS
from tokenmill.arch.gguf_config_keys import SOFTMAX_OF_CHOSEN, ConfigKeys
from tokenmill.arch.spec import Gqa, MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import GGUF, GGUF_OTHER_NORM, HF_LLAMA, Rule

EXPERTS = "model.layers.{i}.mlp.experts."
PARTS = ("gate", "up", "down")
LIMIT, ALPHA = 7.0, 1.702  # constants of "swiglu_oai"


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return replace(attention, has_sinks=True)


def _experts(fields: ConfigFields, layer: int) -> MoeSpec:
    if fields.positive("swiglu_limit") != LIMIT or fields.positive("swiglu_alpha") != ALPHA:
        fields.refuse(f"swiglu_limit and swiglu_alpha other than {LIMIT:g} and {ALPHA:g} are not implemented")
    return MoeSpec(
        num_experts=fields.integer("num_local_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(fields.integer("intermediate_size"), "swiglu_oai", bias=True),
        routing=RoutingSpec(has_router_bias=True),
    )


GPT_OSS = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": LIMIT,
        "swiglu_alpha": ALPHA,
    },
    hf_rules={
        **HF_LLAMA,
        "layers.{i}.sinks": Rule("model.layers.{i}.self_attn.sinks"),
        "layers.{i}.router.weight": Rule("model.layers.{i}.mlp.router.weight"),
        "layers.{i}.router.bias": Rule("model.layers.{i}.mlp.router.bias"),
        **{
            f"layers.{{i}}.experts.{part}.{kind}": Rule(
                EXPERTS + theirs, woven=("gate", "up"), transposed=kind == "weight"
            )
            for part in ("gate", "up")
            for kind, theirs in (("weight", "gate_up_proj"), ("bias", "gate_up_proj_bias"))
        },
        "layers.{i}.experts.down.weight": Rule(EXPERTS + "down_proj", transposed=True),
        "layers.{i}.experts.down.bias": Rule(EXPERTS + "down_proj_bias"),
    },
    gguf=GGUFTraits(
        "gpt-oss",
        {
            **GGUF,
            **GGUF_OTHER_NORM,
            "layers.{i}.sinks": Rule("blk.{i}.attn_sinks.weight"),
            "layers.{i}.router.bias": Rule("blk.{i}.ffn_gate_inp.bias"),
            **{f"layers.{{i}}.experts.{part}.bias": Rule(f"blk.{{i}}.ffn_{part}_exps.bias") for part in PARTS},
        },
        config_keys=ConfigKeys(
            {**EXPERT_KEYS, "num_local_experts": "expert_count", "intermediate_size": "expert_feed_forward_length"},
            rope={"truncate": False},
            gating=SOFTMAX_OF_CHOSEN,
        ),
    ),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    windows=alternating,
    experts=_experts,
    adjust_attention=_adjust_attention,
)
