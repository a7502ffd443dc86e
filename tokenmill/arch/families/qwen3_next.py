"""Qwen3-Next: gated DeltaNet in three of four layers, gated attention in the others, routed experts and a gated shared
one.

Norm weights are stored minus one, except for the norm after the recurrence. Queries and their gates share one matrix,
alternating by heads. The q, k, v and z of the recurrence share one matrix too, repeated for each key head.
"""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.qwen2_moe import GGUF_SHARED, QWEN2_MOE, SHARED_KEYS, shared_experts
from tokenmill.arch.families.qwen3_moe import HF_ROUTED
from tokenmill.arch.family import Family, GGUFTraits, MtpNames, refuse_others
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import SOFTMAX, ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.recurrent import OutputNorm, Recurrent
from tokenmill.arch.spec import AttentionGate, Gqa, LayerSpec
from tokenmill.arch.tensors import GGUF, GGUF_FUSED_EXPERTS, GGUF_OTHER_NORM, HF_LLAMA, Rule, Rules

NORMS = {
    "layers.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    "final_norm.weight": "model.norm.weight",
}
QUERIES_AND_GATE = Rule("model.layers.{i}.self_attn.q_proj.weight", woven=("q", "attn_gate"))
CONV_PARTS = ("ssm_conv_q", "ssm_conv_k", "ssm_conv_v")

HF_DELTA: Rules = {
    **{f"layers.{{i}}.{part}.weight": Rule("model.layers.{i}.linear_attn.conv1d.weight", CONV_PARTS, unit_axis=1)
       for part in CONV_PARTS},
    "layers.{i}.ssm_a_log": Rule("model.layers.{i}.linear_attn.A_log"),
    "layers.{i}.ssm_dt_bias": Rule("model.layers.{i}.linear_attn.dt_bias"),
    "layers.{i}.ssm_norm.weight": Rule("model.layers.{i}.linear_attn.norm.weight"),
    "layers.{i}.ssm_out.weight": Rule("model.layers.{i}.linear_attn.out_proj.weight"),
}  # fmt: skip

HF_GATED: Rules = {
    **HF_LLAMA,
    **{ours: Rule(theirs, add=1.0) for ours, theirs in NORMS.items()},
    "layers.{i}.q.weight": QUERIES_AND_GATE,
    "layers.{i}.attn_gate.weight": QUERIES_AND_GATE,
    **HF_DELTA,
}

HF_MTP = MtpNames(
    {
        "join.weight": Rule("mtp.fc.weight"),
        "join_embed_norm.weight": Rule("mtp.pre_fc_norm_embedding.weight", add=1.0),
        "join_state_norm.weight": Rule("mtp.pre_fc_norm_hidden.weight", add=1.0),
        "final_norm.weight": Rule("mtp.norm.weight", add=1.0),
    },
    layers="mtp.layers.",
    number=0,
)

QKV = ("ssm_q", "ssm_k", "ssm_v")
GGUF_DELTA: Rules = {
    **GGUF,
    **GGUF_OTHER_NORM,
    "layers.{i}.q.weight": Rule("blk.{i}.attn_q.weight", woven=("q", "attn_gate")),
    "layers.{i}.attn_gate.weight": Rule("blk.{i}.attn_q.weight", woven=("q", "attn_gate")),
    **{f"layers.{{i}}.{part}.weight": Rule("blk.{i}.attn_qkv.weight", QKV) for part in QKV},
    "layers.{i}.ssm_z.weight": Rule("blk.{i}.attn_gate.weight"),
    **{f"layers.{{i}}.{part}.weight": Rule("blk.{i}.ssm_conv1d.weight", CONV_PARTS) for part in CONV_PARTS},
    "layers.{i}.ssm_a_log": Rule("blk.{i}.ssm_a", minus_exp=True),
    "layers.{i}.ssm_dt_bias": Rule("blk.{i}.ssm_dt.bias"),
    "layers.{i}.ssm_norm.weight": Rule("blk.{i}.ssm_norm.weight"),
    "layers.{i}.ssm_out.weight": Rule("blk.{i}.ssm_out.weight"),
}
TILED = "linear_value_heads_are_tiled"  # set for GGUF files only: value head h uses key head h % key_heads


def _delta_sizes(fields: ConfigFields, gguf: GGUFFile) -> dict[str, int]:
    return {"linear_value_head_dim": fields.integer("ssm.inner_size") // fields.integer("ssm.time_step_rank")}


DELTA_KEYS = ConfigKeys(
    {
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "full_attention_interval": "full_attention_interval",
    },
    gating=SOFTMAX,
    more=_delta_sizes,
)

HF_SHARED: Rules = {name: rule for name, rule in QWEN2_MOE.hf_rules.items() if ".shared" in name}


def fused_per_key_head(pattern: str, *parts: str) -> Rules:
    return {f"layers.{{i}}.{part}.weight": Rule(pattern, parts, is_per_key_head=True) for part in parts}


def delta_layers(fields: ConfigFields, layer_index: int, layer: LayerSpec) -> LayerSpec:
    """Return the layer with a recurrence instead of attention, unless it is a full-attention layer."""
    if _attends(fields, layer_index):
        return layer
    key_heads, value_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    if value_heads % key_heads:
        fields.refuse(f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}")
    mixer = Recurrent(
        "delta",
        key_heads,
        value_heads,
        fields.integer("linear_key_head_dim"),
        fields.integer("linear_value_head_dim"),
        fields.integer("linear_conv_kernel_dim", minimum=2),
        OutputNorm(value_heads, is_shared=True, gates_first=False),
        is_tiled=bool(fields.get(TILED)) and value_heads != key_heads,
    )
    return replace(layer, mixer=mixer)


def _attends(fields: ConfigFields, layer_index: int) -> bool:
    kinds = fields.strings("layer_types", fields.integer("num_hidden_layers"))
    if kinds is None:
        return (layer_index + 1) % fields.integer("full_attention_interval") == 0
    refuse_others(fields, kinds, "linear_attention", "full_attention")
    return kinds[layer_index] == "full_attention"


def gated(fields: ConfigFields, layer_index: int, attention: Gqa) -> Gqa:
    if fields.get("attn_output_gate") is False:
        fields.refuse("attn_output_gate is false, which is not implemented")
    return replace(attention, gate=AttentionGate())


QWEN3_NEXT = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    defaults={
        "hidden_act": "silu",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    hf_rules={
        **HF_GATED,
        **HF_ROUTED,
        **HF_SHARED,
        **fused_per_key_head("model.layers.{i}.linear_attn.in_proj_qkvz.weight", "ssm_q", "ssm_k", "ssm_v", "ssm_z"),
        **fused_per_key_head("model.layers.{i}.linear_attn.in_proj_ba.weight", "ssm_b", "ssm_a"),
    },
    gguf=GGUFTraits(
        "qwen3next",
        {**GGUF_SHARED, **GGUF_DELTA, **fused_per_key_head("blk.{i}.ssm_ba.weight", "ssm_b", "ssm_a")},
        config_keys=replace(DELTA_KEYS, keys={**DELTA_KEYS.keys, **SHARED_KEYS}),
        variant=GGUF_FUSED_EXPERTS,
    ),
    qk_norm="head",
    has_partial_rotary=True,
    experts=shared_experts,
    adjust_attention=gated,
    adjust_layer=delta_layers,
    refused_flags=("attention_bias", "use_sliding_window"),
    ignored_prefixes=("mtp.",),
    mtp=HF_MTP,
)
