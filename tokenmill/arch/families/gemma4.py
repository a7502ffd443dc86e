"""Gemma 4, text: five windowed layers to each global one, whose heads are wider and may use their keys as values; the
last layers of small models read the keys and values of earlier ones, and each layer has an embedding of its own. The
26B model has an MLP and experts side by side."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.family import TEXT_PREFIXES, VISION_PREFIXES, Family, alternating
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, MoeSpec, RopeSpec, RoutingSpec
from tokenmill.arch.tensors import HF_LLAMA, HF_QK_NORM, Rule

SIDE = "layers.{i}.side."
THEIRS = "model.layers.{i}."


def is_windowed(fields: ConfigFields, layer: int) -> bool:
    return alternating(fields, fields.integer("num_hidden_layers"))[layer] is not None


def shared_layer(fields: ConfigFields, layer: int) -> int | None:
    """The layer whose keys and values this one reads: the last of its kind that has some of its own."""
    first = fields.integer("num_hidden_layers") - fields.integer("num_kv_shared_layers", minimum=0)
    if layer < first or first <= 0:
        return None
    alike = [other for other in range(first) if is_windowed(fields, other) == is_windowed(fields, layer)]
    if not alike:
        fields.refuse(f"layer {layer} shares keys and values, but no layer of its kind has any")
    return alike[-1]


def _of_layer(fields: ConfigFields, layer: int, key: str, global_key: str, default: int) -> int:
    """A size that global layers, or single ones, may have for themselves."""
    for number, own in (fields.section("per_layer_config") or {}).items():
        if number.isdecimal() and int(number) == layer and isinstance(own, dict) and key in own:
            return ConfigFields(own, f"{fields.source} per_layer_config {layer}").integer(key)
    return default if is_windowed(fields, layer) else fields.integer_or_none(global_key) or default


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    head_dim = _of_layer(fields, layer, "head_dim", "global_head_dim", attention.head_dim)
    is_key, is_local = fields.flag("attention_k_eq_v"), is_windowed(fields, layer)
    default = attention.num_kv_heads
    global_key = "num_global_key_value_heads" if is_key else "num_key_value_heads"
    return replace(
        attention,
        num_kv_heads=_of_layer(fields, layer, "num_key_value_heads", global_key, default),
        head_dim=head_dim,
        scale=1.0,
        rope=None if attention.rope is None else _wider(attention.rope, attention.head_dim, head_dim),
        value_is_key=is_key and not is_local,
        has_value_norm=True,
        shares_kv_of=shared_layer(fields, layer),
    )


def _wider(rope: RopeSpec, old: int, new: int) -> RopeSpec:
    """The rotation for heads of another width."""
    angles = None if rope.num_angles is None else rope.num_angles * new // old
    return replace(rope, rotary_dim=rope.rotary_dim * new // old, num_angles=angles)


def _adjust_layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    mlp = layer.mlp
    assert isinstance(mlp, MlpSpec)
    if fields.flag("use_double_wide_mlp") and shared_layer(fields, index) is not None:
        mlp = replace(mlp, intermediate_size=2 * mlp.intermediate_size)
    side = None
    if fields.flag("enable_moe_block"):
        side = MoeSpec(
            num_experts=fields.integer("num_experts"),
            num_active=fields.integer("top_k_experts"),
            expert=MlpSpec(fields.integer("moe_intermediate_size"), mlp.activation),
            routing=RoutingSpec(has_input_norm=True, has_expert_scales=True),
        )
    width = fields.integer("hidden_size_per_layer_input", minimum=0)
    return replace(layer, mlp=mlp, side_experts=side, input_width=width, has_scale=True)


GEMMA4 = Family(
    name="gemma4",
    model_types=("gemma4_text", "gemma4"),
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 256,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    hf_rules={
        **HF_LLAMA,
        **HF_QK_NORM,
        "layers.{i}.attn_post_norm.weight": Rule(THEIRS + "post_attention_layernorm.weight"),
        "layers.{i}.mlp_norm.weight": Rule(THEIRS + "pre_feedforward_layernorm.weight"),
        "layers.{i}.mlp_post_norm.weight": Rule(THEIRS + "post_feedforward_layernorm.weight"),
        "layers.{i}.input_gate.weight": Rule(THEIRS + "per_layer_input_gate.weight"),
        "layers.{i}.input_up.weight": Rule(THEIRS + "per_layer_projection.weight"),
        "layers.{i}.input_norm.weight": Rule(THEIRS + "post_per_layer_input_norm.weight"),
        "layers.{i}.scale": Rule(THEIRS + "layer_scalar"),
        "layer_inputs.embed.weight": Rule("model.embed_tokens_per_layer.weight"),
        "layer_inputs.project.weight": Rule("model.per_layer_model_projection.weight"),
        "layer_inputs.norm.weight": Rule("model.per_layer_projection_norm.weight"),
        SIDE + "norm.weight": Rule(THEIRS + "pre_feedforward_layernorm_2.weight"),
        SIDE + "post_norm.weight": Rule(THEIRS + "post_feedforward_layernorm_2.weight"),
        SIDE + "mlp_post_norm.weight": Rule(THEIRS + "post_feedforward_layernorm_1.weight"),
        SIDE + "router.weight": Rule(THEIRS + "router.proj.weight"),
        SIDE + "router_norm.weight": Rule(THEIRS + "router.scale"),
        SIDE + "expert_scales": Rule(THEIRS + "router.per_expert_scale"),
        SIDE + "experts.gate.weight": Rule(THEIRS + "experts.gate_up_proj", fused=("gate", "up")),
        SIDE + "experts.up.weight": Rule(THEIRS + "experts.gate_up_proj", fused=("gate", "up")),
        SIDE + "experts.down.weight": Rule(THEIRS + "experts.down_proj"),
    },
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    activation_key="hidden_activation",
    qk_norm="head",
    norms="both",
    exceeds_float16=True,
    scaled_embeddings=True,
    has_softcaps=True,
    has_partial_rotary=True,
    windows=alternating,
    adjust_attention=_adjust_attention,
    adjust_layer=_adjust_layer,
    hf_prefixes=TEXT_PREFIXES,
    ignored_prefixes=(*VISION_PREFIXES, "model.audio_tower.", "model.embed_audio.", "model.embed_vision."),
)
