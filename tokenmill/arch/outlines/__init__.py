"""Outlines of models that the engine does not run: enough to say what they need, by the words of their configs.

A family that the engine learns to run leaves this table by itself: its `ModelSpec` is preferred. Of models that also
see or hear, the part that reads and writes text is outlined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenmill.arch.families import BY_MODEL_TYPE
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.hf_config import MAX_LAYERS, spec_from_hf
from tokenmill.arch.outline import LayerOutline, Model, ModelOutline
from tokenmill.arch.outlines.grouped import (
    glm4_moe_layers,
    gpt_oss_layers,
    llama4_layers,
    minimax_m2_layers,
    phi_layers,
)
from tokenmill.arch.outlines.latent import latent_layers
from tokenmill.arch.outlines.recurrent import nemotron_layers, qwen35_layers
from tokenmill.errors import UnsupportedModel

Reader = Callable[[ConfigFields], tuple[LayerOutline, ...]]

LAYERS: dict[str, Reader] = {
    "deepseek_v2": latent_layers,
    "deepseek_v3": latent_layers,
    "deepseek_v32": latent_layers,
    "glm_moe_dsa": latent_layers,
    "kimi_k2": latent_layers,
    "kimi_k25": latent_layers,
    "glm4_moe": glm4_moe_layers,
    "gpt_oss": gpt_oss_layers,
    "llama4": llama4_layers,
    "llama4_text": llama4_layers,
    "minimax_m2": minimax_m2_layers,
    "nemotron_h": nemotron_layers,
    "phi-msft": phi_layers,
    "qwen3_5": qwen35_layers,
    "qwen3_5_moe": qwen35_layers,
    "qwen3_5_text": qwen35_layers,
    "qwen3_5_moe_text": qwen35_layers,
}
SAME_TEXT_MODEL = {"mimo": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
DEFAULTS = {
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 0,
    "full_attention_interval": 4,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "use_qk_norm": False,
}


def outline_from_hf(config: Mapping[str, Any]) -> Model:
    """A config as what can be planned with: a spec where the engine runs the model, an outline elsewhere."""
    model_type = str(config.get("model_type"))
    if model_type in BY_MODEL_TYPE:
        return spec_from_hf(config)
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, dict) else dict(config)
    if model_type in SAME_TEXT_MODEL:
        return spec_from_hf({**_without_parts(merged), "model_type": SAME_TEXT_MODEL[model_type]})
    if model_type not in LAYERS:
        known = ", ".join(sorted([*BY_MODEL_TYPE, *SAME_TEXT_MODEL, *LAYERS]))
        raise UnsupportedModel(f"model_type {model_type!r} is not known", hint=f"these are: {known}")
    return _outline(ConfigFields(merged, model_type, DEFAULTS), model_type)


def _without_parts(config: dict[str, Any]) -> dict[str, Any]:
    """How positions of pictures are rotated is no matter of size."""
    dropped = ("text_config", "architectures", "rope_scaling", "rope_parameters")
    return {"rope_theta": 10000.0, **{key: value for key, value in config.items() if key not in dropped}}


def _outline(fields: ConfigFields, family: str) -> ModelOutline:
    is_phi = family == "phi-msft"
    if fields.integer("n_layer" if is_phi else "num_hidden_layers") > MAX_LAYERS:
        fields.refuse(f"more than {MAX_LAYERS} layers")
    if is_phi:
        return _phi(fields)
    hidden, layers = fields.integer("hidden_size"), LAYERS[family](fields)
    if not 0 < len(layers) <= MAX_LAYERS:
        fields.refuse(f"{len(layers)} layers")
    for one in layers:
        if one.num_active > one.num_experts:
            fields.refuse(f"{one.num_active} experts a token are not possible with {one.num_experts}")
    return ModelOutline(
        family,
        fields.integer("vocab_size"),
        hidden,
        layers,
        fields.flag("tie_word_embeddings"),
        fields.integer("max_position_embeddings"),
        end_vectors=hidden,
    )


def _phi(fields: ConfigFields) -> ModelOutline:
    """Phi-1.5 and Phi-2 name everything in GPT-2's words; their head has a bias."""
    hidden, vocab = fields.integer("n_embd"), fields.integer("vocab_size")
    return ModelOutline(
        "phi-msft",
        vocab,
        hidden,
        phi_layers(fields),
        fields.flag("tie_word_embeddings"),
        fields.integer("n_positions"),
        "float16",
        2 * hidden + vocab,
    )
