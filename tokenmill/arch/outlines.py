"""Outlines of models that the engine does not run, read from their configs, so that the planner can size them.

A family's `ModelSpec` takes precedence as soon as the engine supports it. Of multimodal models only the text part is
outlined.

Latent attention (MLA, DeepSeek): a token caches one latent vector and one rotated key for all heads together, and with
sparse attention (V3.2, GLM-5) the indexer's key. Attention is counted as if every query attended to all keys, sparse or
not: an upper bound. Multi-token-prediction heads (MTP) are not counted, as in model cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.arch.families import BY_MODEL_TYPE
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.hf_config import MAX_LAYERS, spec_from_hf
from tokenmill.arch.outline import Model, ModelOutline
from tokenmill.arch.outline_layers import LAYERS, phi_layers
from tokenmill.arch.text_parts import MULTIMODAL, text_type
from tokenmill.errors import UnsupportedModel

# ── the table ──────────────────────────────────────────────────────────────────────────────────────


# model_type → the features that the engine lacks to run it.
MISSING = {
    "kimi_k3": "recurrent layers with a decay per channel, gated latent attention",
    "nemotron-nas": "layers of different sizes, or without attention",
    "phi-msft": "GPT-2's tensor names (the same model is supported as `phi`)",
}
DEFAULTS = {
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}


def outline_from_hf(config: Mapping[str, Any]) -> Model:
    """Read a config for the planner: as a spec if the engine runs the model, else as an outline."""
    model_type = str(config.get("model_type"))
    if model_type in BY_MODEL_TYPE or text_type(config) is not None:
        return spec_from_hf(config)
    if model_type not in LAYERS:
        known = ", ".join(sorted([*BY_MODEL_TYPE, *MULTIMODAL, *LAYERS]))
        raise UnsupportedModel(f"model_type {model_type!r} is not known", hint=f"these are: {known}")
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, dict) else dict(config)
    return _outline(ConfigFields(merged, model_type, DEFAULTS), model_type)


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
            fields.refuse(f"{one.num_active} experts per token are not possible with {one.num_experts}")
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
    """Read an older Phi-1.5 or Phi-2 config, which uses GPT-2's keys; the head has a bias."""
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
