"""MiniCPM 3: latent attention and an MLP in every layer, multipliers of the embedding, of what is added to the residual
stream and of the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.deepseek import HF_LATENT, NOT_OF_HEADS
from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile, read_floats
from tokenmill.arch.spec import LayerSpec, ModelSpec
from tokenmill.arch.tensors import GGUF, GGUF_LATENT, Rules


def _halves(rules: Rules) -> Rules:
    """Return the rules for rows in the order of our rotation."""
    return {ours: replace(rule, interleaved=False) for ours, rule in rules.items()}


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the size of value heads, which older files leave out."""
    if config.get("v_head_dim") is not None:
        return config
    fields = ConfigFields(config, "minicpm3")
    return {**config, "v_head_dim": fields.integer("hidden_size") // fields.integer("num_attention_heads")}


def _adjust_layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    depth = fields.positive_or_none("scale_depth")
    return layer if depth is None else replace(layer, residual_scale=depth / fields.integer("num_hidden_layers") ** 0.5)


def _adjust_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    width = fields.positive_or_none("dim_model_base") or model.hidden_size
    return replace(model, embedding_scale=fields.positive("scale_emb"), logit_scale=width / model.hidden_size)


def _more(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return the sizes of a head, and the rope factors, which are tensors."""
    rope = fields.integer("rope.dimension_count")
    found: dict[str, Any] = {
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": fields.integer("attention.key_length") - rope,
        "q_lora_rank": fields.integer_or_none("attention.q_lora_rank"),
    }
    long, short = (gguf.tensors.get(f"rope_factors_{length}.weight") for length in ("long", "short"))
    if long is not None and short is not None:
        factors = {"long_factor": list(read_floats(long)), "short_factor": list(read_floats(short))}
        found["rope_scaling"] = {"type": "longrope", **factors}
    return found


MINICPM3 = Family(
    name="minicpm3",
    model_types=("minicpm3",),
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    hf_rules=_halves(HF_LATENT),
    gguf=GGUFTraits(
        "minicpm3",
        {**GGUF, **_halves(GGUF_LATENT)},
        config_keys=ConfigKeys({"kv_lora_rank": "attention.kv_lora_rank"}, more=_more, without=NOT_OF_HEADS),
    ),
    is_latent=True,
    common_keys=_common_keys,
    adjust_layer=_adjust_layer,
    adjust_model=_adjust_model,
    refused_flags=("attention_bias", "mlp_bias"),
)
