"""Nemotron-H and Nemotron 3: Mamba-2, attention without rotation, squared-ReLU MLPs and experts, one to a layer.

A `LayerSpec` has a mixer followed by an MLP or experts. So two layers of the checkpoint become one where an MLP or
experts follow a mixer (`layers_block_type`, or one letter each in `hybrid_override_pattern`); a mixer followed by
another mixer becomes a layer without an MLP.

    checkpoint    M  E  M  *  E  M  -        M: Mamba-2, *: attention, E: experts, -: MLP
    LayerSpecs   [M  E][M ][*  E][M  -]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from tokenmill.arch.families.bamba import hf_mamba
from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import EXPERTS as EXPERT_KEYS
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.recurrent import OutputNorm, Recurrent
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import GGUF, GGUF_MAMBA, GGUF_ROUTED, HF_LLAMA, Rule, Rules

LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
OLDER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
MIXERS = ("linear_attention", "full_attention")
PAIRS = "_layer_pairs"  # (type and number of a mixer, type (or None) and number of the MLP or experts after it)


def _common_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with layers counted as `LayerSpec`s, and the checkpoint layers that each consists of."""
    pattern, kinds = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if kinds is None and isinstance(pattern, str):
        kinds = [LETTERS.get(letter, letter) for letter in pattern]
    fields = ConfigFields({"layers_block_type": kinds}, "nemotron_h")
    if not isinstance(kinds, list) or not kinds:
        fields.refuse("neither layers_block_type nor hybrid_override_pattern lists any layers")
    kinds = [OLDER_KINDS.get(kind, kind) for kind in kinds]
    pairs: list[tuple[str, int, str | None, int]] = []
    for number, kind in enumerate(kinds):
        if kind in MIXERS:
            pairs.append((kind, number, None, number))
        elif kind not in LETTERS.values():
            fields.refuse(f"layer type {kind!r} is not implemented")
        elif not pairs or pairs[-1][2] is not None:
            fields.refuse(
                f"layer {number} is {kind!r} without attention or Mamba-2 before it, which is not implemented"
            )
        else:
            pairs[-1] = (*pairs[-1][:2], kind, number)
    head_dim = {"head_dim": config["attention_head_dim"]} if "attention_head_dim" in config else {}
    return {**head_dim, **config, "num_hidden_layers": len(pairs), PAIRS: pairs}


def _mamba2(fields: ConfigFields) -> Recurrent:
    groups, heads = fields.integer("n_groups"), fields.integer("mamba_num_heads")
    if heads % groups:
        fields.refuse(f"{heads} heads of Mamba-2 can't be in {groups} groups")
    return Recurrent(
        "ssd",
        groups,
        heads,
        fields.integer("ssm_state_size"),
        fields.integer("mamba_head_dim"),
        fields.integer("conv_kernel", minimum=2),
        OutputNorm(groups, is_shared=False, gates_first=True),
        conv_bias=fields.flag("use_conv_bias"),
        bias=fields.flag("use_bias"),
        step_limits=(fields.positive("time_step_min"), inf),
    )


def _experts(fields: ConfigFields, layer_index: int) -> MoeSpec | None:
    if fields.get(PAIRS)[layer_index][2] != "moe":
        return None
    return MoeSpec(
        num_experts=fields.integer("n_routed_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(fields.integer("moe_intermediate_size"), is_gated=False),
        routing=RoutingSpec(
            "sigmoid",
            renormalize=fields.flag("norm_topk_prob"),
            epsilon=1e-20,
            has_choice_bias=True,
            num_groups=fields.integer("n_group"),
            kept_groups=fields.integer("topk_group"),
            scale=fields.positive("routed_scaling_factor"),
        ),
        shared=MlpSpec(fields.integer("moe_shared_expert_intermediate_size"), is_gated=False),
        latent_size=fields.integer_or_none("moe_latent_size"),
    )


def _attention(fields: ConfigFields, layer_index: int, attention: Gqa) -> Gqa:
    return replace(attention, rope=None)


def _layer(fields: ConfigFields, layer_index: int, layer: LayerSpec) -> LayerSpec:
    mixer, _, fed, _ = fields.get(PAIRS)[layer_index]
    if mixer == "linear_attention":
        layer = replace(layer, mixer=_mamba2(fields))
    return layer if fed is not None else replace(layer, mlp=None)


def _model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    return replace(model, layer_numbers=tuple((mixer, fed) for _, mixer, _, fed in fields.get(PAIRS)))


PLACE = "backbone.layers.{i}"
HF_NEMOTRON: Rules = {
    **HF_LLAMA,
    "embed.weight": Rule("backbone.embeddings.weight"),
    "final_norm.weight": Rule("backbone.norm_f.weight"),
    "layers.{i}.attn_norm.weight": Rule(f"{PLACE}.norm.weight"),
    "layers.{i}.mlp_norm.weight": Rule(f"{PLACE}.norm.weight"),
    **{f"layers.{{i}}.{part}.{kind}": Rule(f"{PLACE}.mixer.{part}_proj.{kind}")
       for part in ("q", "k", "v", "o", "up", "down") for kind in ("weight", "bias")},
    **hf_mamba(f"{PLACE}.mixer"),
    "layers.{i}.router.weight": Rule(f"{PLACE}.mixer.gate.weight"),
    "layers.{i}.choice_bias": Rule(f"{PLACE}.mixer.gate.e_score_correction_bias"),
    "layers.{i}.latent_in.weight": Rule(f"{PLACE}.mixer.fc1_latent_proj.weight"),
    "layers.{i}.latent_out.weight": Rule(f"{PLACE}.mixer.fc2_latent_proj.weight"),
    **{f"layers.{{i}}.experts.{part}.weight": Rule(f"{PLACE}.mixer.experts.{{e}}.{part}_proj.weight")
       for part in ("up", "down")},
    **{f"layers.{{i}}.shared.{part}.weight": Rule(f"{PLACE}.mixer.shared_experts.{part}_proj.weight")
       for part in ("up", "down")},
}  # fmt: skip


def _kinds_of_blocks(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return the type of each block: one with key heads is attention, one with a feed-forward length an MLP or experts,
    others Mamba-2."""
    count = fields.integer("block_count") - (fields.integer_or_none("nextn_predict_layers", minimum=0) or 0)
    heads, widths = (fields.integers(key) for key in ("attention.head_count_kv", "feed_forward_length"))
    if len(heads) < count or len(widths) < count:
        fields.refuse("attention.head_count_kv and feed_forward_length must have an entry for each block")
    fed = "moe" if fields.get("expert_count") else "mlp"
    kinds = [
        "full_attention" if own else fed if width else "linear_attention"
        for own, width in zip(heads, widths, strict=True)
    ]
    found: dict[str, Any] = {
        "layers_block_type": kinds[:count],
        "num_key_value_heads": max(heads),
        "intermediate_size": max(widths),
        "mamba_head_dim": fields.integer("ssm.inner_size") // fields.integer("ssm.time_step_rank"),
    }
    if (fields.integer_or_none("expert_group_count", minimum=0) or 1) > 1:
        found["topk_group"] = fields.integer("expert_group_used_count")
    return found


GGUF_NEMOTRON: Rules = {
    **GGUF,
    **GGUF_MAMBA,
    **GGUF_ROUTED,
    "layers.{i}.mlp_norm.weight": Rule("blk.{i}.attn_norm.weight"),  # the only norm of a block
    "layers.{i}.latent_in.weight": Rule("blk.{i}.ffn_latent_down.weight"),
    "layers.{i}.latent_out.weight": Rule("blk.{i}.ffn_latent_up.weight"),
}
NEMOTRON_KEYS = ConfigKeys(
    {
        **EXPERT_KEYS,
        "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
        "ssm_state_size": "ssm.state_size",
        "mamba_num_heads": "ssm.time_step_rank",
        "n_groups": "ssm.group_count",
        "conv_kernel": "ssm.conv_kernel",
        "n_routed_experts": "expert_count",
        "n_group": "expert_group_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "moe_latent_size": "moe_latent_size",
    },
    {"use_conv_bias": "blk.0.ssm_conv1d.bias"},
    more=_kinds_of_blocks,
    without=("layer_types", "partial_rotary_factor"),
)

NEMOTRON_H = Family(
    name="nemotron_h",
    model_types=("nemotron_h",),
    defaults={
        "mlp_hidden_act": "relu2",
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10000.0,  # no layer rotates
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "time_step_min": 0.001,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    hf_rules=HF_NEMOTRON,
    gguf=GGUFTraits("nemotron_h", GGUF_NEMOTRON, config_keys=NEMOTRON_KEYS, other_archs=("nemotron_h_moe",)),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    activation_key="mlp_hidden_act",
    is_gated_mlp=False,
    norm_eps_key="layer_norm_epsilon",
    experts=_experts,
    common_keys=_common_keys,
    adjust_attention=_attention,
    adjust_layer=_layer,
    adjust_model=_model,
    refused_flags=("sliding_window", "residual_in_fp32"),
    ignored_prefixes=("mtp.",),
)
