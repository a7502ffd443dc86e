"""Gemma 4, text part: five windowed layers per global one, whose heads are wider and may use keys as values. In small
models, the last layers read the keys and values of earlier ones, and each layer has its own token embedding. The 26B
model has an MLP and experts in parallel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenmill.arch.family import TEXT_PREFIXES, VISION_PREFIXES, Family, GGUFTraits, alternating
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import SOFTMAX, ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile, read_floats
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, MoeSpec, RopeSpec, RoutingSpec
from tokenmill.arch.tensors import GGUF, HF_LLAMA, HF_QK_NORM, Rule, Rules

SIDE = "layers.{i}.side."
THEIRS = "model.layers.{i}."


def is_windowed(fields: ConfigFields, layer: int) -> bool:
    return alternating(fields, fields.integer("num_hidden_layers"))[layer] is not None


def shared_layer(fields: ConfigFields, layer: int) -> int | None:
    """Return the layer whose keys and values this one reads: the last of the same type that has its own. None: this
    layer has its own."""
    first = fields.integer("num_hidden_layers") - fields.integer("num_kv_shared_layers", minimum=0)
    if layer < first or first <= 0:
        return None
    alike = [other for other in range(first) if is_windowed(fields, other) == is_windowed(fields, layer)]
    if not alike:
        fields.refuse(f"layer {layer} shares keys and values, but no layer of its kind has any")
    return alike[-1]


def _of_layer(fields: ConfigFields, layer: int, key: str, global_key: str, default: int) -> int:
    """Return a size that may differ for global layers or for single layers."""
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
    """Return a rotation converted to heads of another width."""
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


def _further_config(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return the sizes of windowed and global layers, and the share of a global head that rotates."""
    pattern = fields.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        fields.refuse("attention.sliding_window_pattern is missing")
    count, widths = len(pattern), fields.integers("feed_forward_length")
    heads = fields.integers("attention.head_count_kv")
    by_layer = heads if len(heads) == count else heads * count
    windowed, full = (
        sorted({by_layer[at] for at in range(count) if bool(pattern[at]) is kind}) for kind in (True, False)
    )
    if len(windowed) > 1 or len(full) > 1:
        fields.refuse("attention.head_count_kv differs between layers of one kind, which is not implemented")
    without_values = [at for at in range(count) if f"blk.{at}.attn_k.weight" in gguf.tensors]
    without_values = [at for at in without_values if f"blk.{at}.attn_v.weight" not in gguf.tensors]
    experts = fields.integer_or_none("expert_count", minimum=0) or 0
    found: dict[str, Any] = {
        "head_dim": fields.integer("attention.key_length_swa"),
        "global_head_dim": fields.integer("attention.key_length"),
        "num_key_value_heads": (windowed or full)[0],
        "attention_k_eq_v": bool(without_values),
        "intermediate_size": min(widths),
        "use_double_wide_mlp": len(set(widths)) > 1,
        "enable_moe_block": experts > 0,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": fields.positive_or_none("rope.freq_base_swa") or 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": fields.positive("rope.freq_base"),
                "partial_rotary_factor": _rotated_share(fields, gguf),
            },
        },
    }
    return found | ({"num_global_key_value_heads": full[0]} if without_values and full else {})


def _rotated_share(fields: ConfigFields, gguf: GGUFFile) -> float:
    """Return the share of a head that rotates: other frequencies have a huge factor in `rope_freqs`."""
    factors = gguf.tensors.get("rope_freqs.weight")
    if factors is None:
        return 1.0
    if factors.type != "F32" or factors.shape != (fields.integer("attention.key_length") // 2,):
        fields.refuse(
            f"tensor 'rope_freqs.weight' is {factors.type} {list(factors.shape)}, expected F32 of half a head"
        )
    numbers = read_floats(factors)
    num_rotated = sum(number == 1.0 for number in numbers)
    if any(number != 1.0 and number < 1e20 for number in numbers) or any(one != 1.0 for one in numbers[:num_rotated]):
        fields.refuse("rope_freqs has factors other than 1 and infinity, which is not implemented")
    return num_rotated / len(numbers)


GGUF_GEMMA4: Rules = {
    **GGUF,
    "layers.{i}.input_gate.weight": Rule("blk.{i}.inp_gate.weight"),
    "layers.{i}.input_up.weight": Rule("blk.{i}.proj.weight"),
    "layers.{i}.input_norm.weight": Rule("blk.{i}.post_norm.weight"),
    "layers.{i}.scale": Rule("blk.{i}.layer_output_scale.weight"),
    "layer_inputs.embed.weight": Rule("per_layer_token_embd.weight"),
    "layer_inputs.project.weight": Rule("per_layer_model_proj.weight"),
    "layer_inputs.norm.weight": Rule("per_layer_proj_norm.weight"),
    SIDE + "norm.weight": Rule("blk.{i}.pre_ffw_norm_2.weight"),
    SIDE + "post_norm.weight": Rule("blk.{i}.post_ffw_norm_2.weight"),
    SIDE + "mlp_post_norm.weight": Rule("blk.{i}.post_ffw_norm_1.weight"),
    SIDE + "router.weight": Rule("blk.{i}.ffn_gate_inp.weight"),
    SIDE + "router_norm.weight": Rule("blk.{i}.ffn_gate_inp.scale"),
    SIDE + "expert_scales": Rule("blk.{i}.ffn_down_exps.scale"),
    SIDE + "experts.gate.weight": Rule("blk.{i}.ffn_gate_up_exps.weight", fused=("gate", "up")),
    SIDE + "experts.up.weight": Rule("blk.{i}.ffn_gate_up_exps.weight", fused=("gate", "up")),
    SIDE + "experts.down.weight": Rule("blk.{i}.ffn_down_exps.weight"),
}
GEMMA4_KEYS = ConfigKeys(
    {
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
        "num_experts": "expert_count",
        "top_k_experts": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    },
    {"attention_bias": "blk.0.attn_q.bias"},
    {"hidden_size_per_layer_input": 0},
    gating=SOFTMAX,
    more=_further_config,
    without=("partial_rotary_factor", "rope_theta"),
    reads_factors=True,
    has_heads_by_kind=True,
)

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
    gguf=GGUFTraits("gemma4", GGUF_GEMMA4, config_keys=GEMMA4_KEYS),
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

GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="gemma4_unified",
    model_types=("gemma4_unified", "gemma4_unified_text"),
    defaults={
        **GEMMA4.defaults,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    gguf=None,
    ignored_prefixes=(*GEMMA4.ignored_prefixes, "model.vision_embedder."),
)
