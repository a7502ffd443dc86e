"""A model family as data: what distinguishes it from others. `families/` has one small file per family; the readers
(`hf_config.py`, `gguf_config.py`) and the weight loaders use this data and never check a family's name.

Files define the layers with a sliding window in several ways: recent ones give the type of each layer in `layer_types`,
older ones a rule. Each function at the end of this file is one such rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import RMS_NORM, Gqa, LayerSpec, ModelSpec, MoeSpec, NormPlace, NormSpec, QkNorm, ShortConv
from tokenmill.arch.tensors import Rule, Rules
from tokenmill.errors import UnsupportedModel

Windows = tuple[int | None, ...]  # one entry per layer
# Models with a vision part: the prefixes before "layers.", and the prefixes of tensors that text generation ignores.
TEXT_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
VISION_PREFIXES = (
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.vision_model.",
    "visual.",
    "model.visual.",
    "model.multi_modal_projector.",
)


def no_windows(fields: ConfigFields, num_layers: int) -> Windows:
    return (None,) * num_layers


def no_convolution(fields: ConfigFields, layer_index: int) -> ShortConv | None:
    return None


def same_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config


def renamed_keys(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a config with further keys: `names` has their names, and those of the values in the file."""
    found = {ours: config[theirs] for ours, theirs in names.items() if config.get(ours) is None and theirs in config}
    return {**config, **found}


def no_experts(fields: ConfigFields, layer_index: int) -> MoeSpec | None:
    return None


def same_attention(fields: ConfigFields, layer_index: int, attention: Gqa) -> Gqa:
    return attention


def same_layer(fields: ConfigFields, layer_index: int, layer: LayerSpec) -> LayerSpec:
    return layer


def same_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    return model


@dataclass(frozen=True)
class MtpNames:
    """The names of a multi-token-prediction (MTP) head's tensors, except those that it shares with the model."""

    rules: Rules  # of the tensors that join embeddings and states, and of the final norm
    layers: str = "model.layers."  # prefix of its layer's number
    number: int | None = None  # of its layer; None: the one after the model's last layer

    def head_rules(self, rules: Rules) -> Rules:
        """Return the head's rules; `rules` are the model's."""
        moved = {
            ours: replace(rule, pattern=self.layers + rule.pattern.removeprefix("model.layers."))
            for ours, rule in rules.items()
            if rule.pattern.startswith("model.layers.")
        }
        return {**rules, **moved, **self.rules}


HF_NEXTN = MtpNames(
    {
        "join.weight": Rule("model.layers.{i}.eh_proj.weight"),
        "join_embed_norm.weight": Rule("model.layers.{i}.enorm.weight"),
        "join_state_norm.weight": Rule("model.layers.{i}.hnorm.weight"),
        "final_norm.weight": Rule("model.layers.{i}.shared_head.norm.weight"),
    }
)
GGUF_NEXTN = MtpNames(
    {
        "join.weight": Rule("blk.{i}.nextn.eh_proj.weight"),
        "join_embed_norm.weight": Rule("blk.{i}.nextn.enorm.weight"),
        "join_state_norm.weight": Rule("blk.{i}.nextn.hnorm.weight"),
        "final_norm.weight": Rule("blk.{i}.nextn.shared_head_norm.weight"),
    }
)


@dataclass(frozen=True)
class GGUFTraits:
    arch: str
    rules: Rules
    window_pattern: int = 0  # 0: no windows are expected; 1: every layer; n: all but every n-th
    default_window: int | None = None
    query_scale_from_width_at: int | None = None  # this many layers: scale is (hidden / heads) ** -0.5
    conv_key: str | None = (
        None  # metadata key of the kernel size of short convolutions (layers without key/value heads)
    )
    config_keys: ConfigKeys | None = None  # translation to config.json; None: the metadata is read directly
    other_with: tuple[str, str] | None = None  # a metadata key, and the family that a file with this key belongs to
    other_value: int | None = None  # the value of that key which selects the other family; None: any
    other_archs: tuple[str, ...] = ()  # further names of the architecture
    variant: Rules = field(default_factory=dict)  # used instead of those in `rules` if a file has such names

    def rules_for(self, names: Collection[str]) -> Rules:
        """Return the rules for a file with tensors of these names."""
        endings = {name.partition("blk.")[2].lstrip("0123456789") for name in names}
        used = {ours: rule for ours, rule in self.variant.items() if rule.pattern.partition("{i}")[2] in endings}
        return {**self.rules, **used}


@dataclass(frozen=True)
class Family:
    name: str
    model_types: tuple[str, ...]  # of config.json
    defaults: Mapping[str, Any]  # transformers' defaults of config keys
    hf_rules: Rules
    gguf: GGUFTraits | None = None  # None: its GGUF files are not implemented
    qkv_bias: bool | str = False  # a string is the config key with the value
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    activation_key: str = "hidden_act"
    is_gated_mlp: bool = True
    qk_norm: QkNorm | None = None
    norms: NormPlace = "before"
    norm: NormSpec = RMS_NORM
    norm_eps_key: str = "rms_norm_eps"
    is_parallel: bool = False
    scaled_embeddings: bool = False  # by hidden_size ** 0.5
    query_scale_key: str | None = None  # scale is this value ** -0.5; head_dim's otherwise
    has_softcaps: bool = False
    exceeds_float16: bool = False  # some of its models have activations larger than 65,504
    has_local_rope: bool = False  # windowed layers rotate with their own base and without scaling
    has_partial_rotary: bool = False
    has_rope_sections: bool = False  # for images; with text positions all sections rotate alike
    windows: Callable[[ConfigFields, int], Windows] = no_windows
    experts: Callable[[ConfigFields, int], MoeSpec | None] = no_experts
    is_latent: bool = False  # attention is latent attention (MLA)
    convolution: Callable[[ConfigFields, int], ShortConv | None] = no_convolution  # of a layer, in attention's place
    # Changes to a layer's attention, to a layer and to the model after they are read as for all families:
    adjust_attention: Callable[[ConfigFields, int, Gqa], Gqa] = same_attention
    adjust_layer: Callable[[ConfigFields, int, LayerSpec], LayerSpec] = same_layer
    adjust_model: Callable[[ConfigFields, ModelSpec], ModelSpec] = same_model
    common_keys: Callable[[Mapping[str, Any]], Mapping[str, Any]] = same_config  # renames to other families' keys
    refused_flags: tuple[str, ...] = ()  # config keys that must be absent, false or null
    hf_variant: Rules = field(default_factory=dict)  # used instead of those in `hf_rules` if a file has such names
    hf_prefixes: tuple[str, ...] = ("model.",)  # before "layers.", most likely first
    ignored_prefixes: tuple[str, ...] = field(default=())  # of tensors that text generation does not need
    ignored_suffixes: tuple[str, ...] = field(default=())  # the same: buffers such as masks
    mtp: MtpNames | None = None  # None: its MTP heads are not implemented, or it has none

    @property
    def gguf_traits(self) -> GGUFTraits:
        if self.gguf is None:
            raise UnsupportedModel(f"{self.name}: GGUF files of this family are not implemented")
        return self.gguf


# ── sliding windows ────────────────────────────────────────────────────────────────────────────────


def refuse_others(fields: ConfigFields, kinds: tuple[str, ...], *known: str) -> None:
    """Refuse layer types that are not known."""
    for kind in sorted(set(kinds) - set(known)):
        fields.refuse(f"layer type {kind!r} is not implemented")


def _windows(fields: ConfigFields, num_layers: int, is_sliding: Callable[[int], bool]) -> Windows:
    window = fields.integer_or_none("sliding_window")
    kinds = fields.strings("layer_types", num_layers)
    if kinds is None:
        return tuple(window if is_sliding(index) else None for index in range(num_layers))
    refuse_others(fields, kinds, "sliding_attention", "full_attention")
    if window is None and "sliding_attention" in kinds:
        fields.refuse("layer_types has windowed layers, but sliding_window is missing")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def every_layer(fields: ConfigFields, num_layers: int) -> Windows:
    """Return windows for every layer, unless `layer_types` says otherwise."""
    return _windows(fields, num_layers, lambda index: True)


def when_used(fields: ConfigFields, num_layers: int) -> Windows:
    """Return windows for every layer if `use_sliding_window` is set."""
    is_used = fields.flag("use_sliding_window")
    return _windows(fields, num_layers, lambda index: is_used)


def upper_layers(fields: ConfigFields, num_layers: int) -> Windows:
    """Return windows from layer `max_window_layers` on if `use_sliding_window` is set."""
    is_used = fields.flag("use_sliding_window")
    first = fields.integer("max_window_layers", minimum=0)
    return _windows(fields, num_layers, lambda index: is_used and index >= first)


def all_but_first(fields: ConfigFields, num_layers: int) -> Windows:
    """Return windows for all but the first of every n layers, n being `sliding_window_pattern`, unless `layer_types` is
    given."""
    pattern = 1 if fields.has("layer_types") else fields.integer("sliding_window_pattern")
    return _windows(fields, num_layers, lambda index: index % pattern != 0)


def named_layers(fields: ConfigFields, num_layers: int) -> Windows:
    """Return windows only for the layers that `layer_types` names."""
    return _windows(fields, num_layers, lambda index: False)


def alternating(fields: ConfigFields, num_layers: int) -> Windows:
    """Return windows for all but every n-th layer, n being `sliding_window_pattern`, unless `layer_types` is given."""
    key = "_sliding_window_pattern" if fields.has("_sliding_window_pattern") else "sliding_window_pattern"
    pattern = 1 if fields.has("layer_types") else fields.integer(key)
    return _windows(fields, num_layers, lambda index: (index + 1) % pattern != 0)


# ── layers that differ from the others ─────────────────────────────────────────────────────────────


def is_dense(fields: ConfigFields, layer_index: int) -> bool:
    """Return whether a layer has an MLP instead of experts: by `mlp_layer_types`, else if it is one of the first
    `first_k_dense_replace`."""
    kinds = fields.strings("mlp_layer_types", fields.integer("num_hidden_layers"))
    if kinds is None:
        return layer_index < fields.integer("first_k_dense_replace", minimum=0)
    refuse_others(fields, kinds, "dense", "sparse")
    return kinds[layer_index] == "dense"


def rotated_windows(windows: Callable[[ConfigFields, int], Windows]) -> Callable[[ConfigFields, int, Gqa], Gqa]:
    """Return an adjustment of attention after which only the layers with windows rotate."""

    def adjust(fields: ConfigFields, layer_index: int, attention: Gqa) -> Gqa:
        is_global = windows(fields, fields.integer("num_hidden_layers"))[layer_index] is None
        return replace(attention, rope=None) if is_global else attention

    return adjust
