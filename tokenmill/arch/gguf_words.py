"""GGUF metadata in the words of config.json, for families whose layers are read from there.

Both say the same of a model under other names. Translated once, a file goes through the same reader as a checkpoint of
the hub, with everything a family knows about its layers, experts and windows:

    glm4moe.expert_used_count = 8      →      "num_experts_per_tok": 8

What no metadata has, tensors tell: a bias is there or not. What neither has is the family's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_file import GGUFFile

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # of `expert_gating_func`
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
class ConfigWords:
    """The names in a family's config.json of what a GGUF file's metadata has."""

    keys: Mapping[str, str] = field(default_factory=dict)  # of config.json → of the metadata, beside COMMON
    tensors: Mapping[str, str] = field(default_factory=dict)  # of config.json → the tensor whose presence makes it true
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what it means that a file says nothing
    rope: Mapping[str, Any] = field(default_factory=dict)  # the same, of a scaled rotation
    gating: int = SIGMOID  # how experts are scored, where a file says it
    more: Callable[[ConfigFields, GGUFFile], Mapping[str, Any]] | None = None  # what several keys say together
    without: tuple[str, ...] = ()  # of config.json: what the metadata's numbers mean something else for
    other_kind: str = "conv"  # what layers without heads of keys and values are
    reads_factors: bool = False  # `more` knows what the tensor of rope factors says
    has_heads_by_kind: bool = False  # and how many heads of keys and values each kind of layers has


def config_of(gguf: GGUFFile, words: ConfigWords) -> dict[str, Any]:
    """The config.json that a GGUF file's metadata and tensors amount to, without `model_type`"""
    arch = str(gguf.metadata["general.architecture"])
    own = {key.removeprefix(arch + "."): value for key, value in gguf.metadata.items() if key.startswith(arch + ".")}
    fields = ConfigFields(own, f"{gguf.path} ({arch})")
    names = {**COMMON, **words.keys}
    found = {ours: fields.get(theirs) for ours, theirs in names.items() if fields.get(theirs) is not None}
    extra = fields.integer_or_none("nextn_predict_layers", minimum=0) or 0
    count = fields.integer("block_count", minimum=extra + 1) - extra
    found |= {"num_hidden_layers": count, "tie_word_embeddings": "output.weight" not in gguf.tensors}
    found |= {ours: theirs in gguf.tensors for ours, theirs in words.tensors.items()}
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        found["vocab_size"] = embedding.shape[0]
    if "rope_freqs.weight" in gguf.tensors and not words.reads_factors:
        fields.refuse("factors of each frequency (rope_freqs) are not implemented for this architecture")
    found |= _rope(fields, found, words) | _kinds(fields, found, count, words)
    if words.more is not None:
        found |= words.more(fields, gguf)
    found = {key: value for key, value in found.items() if key not in words.without}
    if fields.get("expert_gating_func") not in (None, words.gating):
        fields.refuse(f"expert_gating_func {fields.get('expert_gating_func')} is not implemented")
    return {**words.defaults, **found}


def _rope(fields: ConfigFields, found: Mapping[str, Any], words: ConfigWords) -> dict[str, Any]:
    rotary, dim = fields.integer_or_none("rope.dimension_count"), found.get("head_dim")
    if dim is None:
        dim = fields.integer("embedding_length") // fields.integer("attention.head_count")
    said: dict[str, Any] = {} if rotary in (None, dim) else {"partial_rotary_factor": rotary / dim}
    kind = fields.get("rope.scaling.type") or "none"
    if kind == "none":
        return said
    if kind not in ("linear", "yarn"):
        fields.refuse(f"rope scaling {kind!r} is not implemented")
    scaling: dict[str, Any] = {"type": kind, "factor": fields.positive("rope.scaling.factor"), **words.rope}
    if kind == "yarn":
        scaling |= yarn_words(fields)
        if (fields.positive_or_none("rope.scaling.attn_factor") or 1.0) != 1.0:
            fields.refuse("rope.scaling.attn_factor other than 1 is not implemented for this architecture")
    return {**said, "rope_scaling": scaling}


def yarn_words(fields: ConfigFields) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": fields.positive("rope.scaling.factor"),
        "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length"),
        **{ours: fields.positive(theirs) for ours, theirs in YARN.items() if fields.has(theirs)},
    }


def _kinds(fields: ConfigFields, found: Mapping[str, Any], count: int, words: ConfigWords) -> dict[str, Any]:
    """Kinds of layers: with windows, or of another kind where there are no heads of keys and values"""
    pattern, heads = fields.get("attention.sliding_window_pattern"), found.get("num_key_value_heads")
    said: dict[str, Any] = {}
    if isinstance(heads, list) and not words.has_heads_by_kind:
        some = [number for number in heads if number]
        if not some or len(set(some)) > 1:
            fields.refuse("attention.head_count_kv differs between layers, which is not implemented")
        said["num_key_value_heads"] = some[0]
        if len(some) < len(heads):
            said["layer_types"] = ["full_attention" if number else words.other_kind for number in heads[:count]]
    if isinstance(pattern, list):
        said["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern[:count]]
    elif pattern is not None:
        said["sliding_window_pattern"] = fields.integer("attention.sliding_window_pattern")
    return said
