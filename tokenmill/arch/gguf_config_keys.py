"""Translation of GGUF metadata to config.json keys, for families whose spec is read from a config.

Both describe a model under different names. After translation a GGUF file goes through the same reader as a Hugging
Face checkpoint, with all that a family defines about its layers, experts and windows:

    glm4moe.expert_used_count = 8      →      "num_experts_per_tok": 8

What the metadata lacks is read from the tensors (a bias exists or not); otherwise the family's default applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_file import GGUFFile

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # values of `expert_gating_func`
COMMON = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_nextn_predict_layers": "nextn_predict_layers",
}
YARN = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
EXPERTS = {
    "num_experts_per_tok": "expert_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}


@dataclass(frozen=True)
class ConfigKeys:
    """How a family's GGUF metadata is translated to the keys of its config.json."""

    keys: Mapping[str, str] = field(default_factory=dict)  # config key → metadata key, in addition to COMMON
    tensors: Mapping[str, str] = field(default_factory=dict)  # config flag → the tensor whose presence sets it
    defaults: Mapping[str, Any] = field(default_factory=dict)  # config values where a file says nothing
    rope: Mapping[str, Any] = field(default_factory=dict)  # the same for `rope_scaling`
    gating: int = SIGMOID  # the only `expert_gating_func` that is accepted
    more: Callable[[ConfigFields, GGUFFile], Mapping[str, Any]] | None = None  # computes further config values
    without: tuple[str, ...] = ()  # config keys to drop: the metadata's value has another meaning
    other_kind: str = "conv"  # type of layers without key/value heads
    reads_factors: bool = False  # `more` interprets the tensor of rope factors
    has_heads_by_kind: bool = False  # `more` reads the number of key/value heads of each kind of layer


def config_from_gguf(gguf: GGUFFile, keys: ConfigKeys) -> dict[str, Any]:
    """Return the config.json equivalent of a GGUF file's metadata and tensors, without `model_type`."""
    arch = str(gguf.metadata["general.architecture"])
    own = {key.removeprefix(arch + "."): value for key, value in gguf.metadata.items() if key.startswith(arch + ".")}
    fields = ConfigFields(own, f"{gguf.path} ({arch})")
    names = {**COMMON, **keys.keys}
    found = {ours: fields.get(theirs) for ours, theirs in names.items() if fields.get(theirs) is not None}
    extra = fields.integer_or_none("nextn_predict_layers", minimum=0) or 0
    count = fields.integer("block_count", minimum=extra + 1) - extra
    found |= {"num_hidden_layers": count, "tie_word_embeddings": "output.weight" not in gguf.tensors}
    found |= {ours: theirs in gguf.tensors for ours, theirs in keys.tensors.items()}
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        found["vocab_size"] = embedding.shape[0]
    if "rope_freqs.weight" in gguf.tensors and not keys.reads_factors:
        fields.refuse("per-frequency factors (rope_freqs) are not implemented for this architecture")
    found |= _rope(fields, found, keys) | _layer_kinds(fields, found, count, keys)
    if keys.more is not None:
        found |= keys.more(fields, gguf)
    found = {key: value for key, value in found.items() if key not in keys.without}
    if fields.get("expert_gating_func") not in (None, keys.gating):
        fields.refuse(f"expert_gating_func {fields.get('expert_gating_func')} is not implemented")
    return {**keys.defaults, **found}


def _rope(fields: ConfigFields, found: Mapping[str, Any], keys: ConfigKeys) -> dict[str, Any]:
    rotary, config = fields.integer_or_none("rope.dimension_count"), dict[str, Any]()
    if rotary is not None:
        dim = found.get("head_dim")
        if dim is None:
            dim = fields.integer("embedding_length") // fields.integer("attention.head_count")
        config["partial_rotary_factor"] = rotary / dim
    kind = fields.get("rope.scaling.type") or "none"
    if kind == "none":
        return config
    if kind not in ("linear", "yarn"):
        fields.refuse(f"rope scaling {kind!r} is not implemented")
    scaling: dict[str, Any] = {"type": kind, "factor": fields.positive("rope.scaling.factor"), **keys.rope}
    if kind == "yarn":
        scaling |= yarn_keys(fields)
        if (fields.positive_or_none("rope.scaling.attn_factor") or 1.0) != 1.0:
            fields.refuse("rope.scaling.attn_factor other than 1 is not implemented for this architecture")
    return {**config, "rope_scaling": scaling}


def yarn_keys(fields: ConfigFields) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": fields.positive("rope.scaling.factor"),
        "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length"),
        **{ours: fields.positive(theirs) for ours, theirs in YARN.items() if fields.has(theirs)},
    }


def _layer_kinds(fields: ConfigFields, found: Mapping[str, Any], count: int, keys: ConfigKeys) -> dict[str, Any]:
    """Return which layers have windows, and which are not attention because they have no key/value heads."""
    pattern, heads = fields.get("attention.sliding_window_pattern"), found.get("num_key_value_heads")
    config: dict[str, Any] = {}
    if isinstance(heads, list) and not keys.has_heads_by_kind:
        some = [number for number in heads if number]
        if not some or len(set(some)) > 1:
            fields.refuse("attention.head_count_kv differs between layers, which is not implemented")
        config["num_key_value_heads"] = some[0]
        if len(some) < len(heads):
            config["layer_types"] = ["full_attention" if number else keys.other_kind for number in heads[:count]]
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern[:count]]
    elif pattern is not None:
        config["sliding_window_pattern"] = fields.integer("attention.sliding_window_pattern")
    return config
