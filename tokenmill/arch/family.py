"""A family of models: what sets it apart from others, as data. `families/` has one small file per family; the readers
(`hf_config.py`, `gguf_config.py`) and the weight loaders look things up here and never ask for a family by name.

Which layers attend through a sliding window is said in several ways: `layer_types` (recent files) names each layer,
older files give a rule, and each function at the end is one such rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_words import ConfigWords
from tokenmill.arch.spec import RMS_NORM, Gqa, LayerSpec, ModelSpec, MoeSpec, NormPlace, NormSpec, QkNorm, ShortConv
from tokenmill.arch.tensors import Rule, Rules
from tokenmill.errors import UnsupportedModel

Windows = tuple[int | None, ...]  # one entry per layer
# Models that see pictures: what stands before "layers.", and what text generation leaves out.
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


def as_it_is(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config


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
    """Where a checkpoint has the head that predicts one more token (MTP), beside what it shares with the model."""

    rules: Rules  # of what joins embeddings and states, and of the norm behind the layer
    layers: str = "model.layers."  # before its layer's number
    number: int | None = None  # of its layer; None: the one behind the model's last

    def rules_beside(self, rules: Rules) -> Rules:
        """The head's rules, where the model's are `rules`."""
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
    conv_key: str | None = None  # has the kernel of short convolutions, in layers with no key/value heads
    words: ConfigWords | None = None  # where metadata is read as a config.json: how that says it
    other_with: tuple[str, str] | None = None  # a key of the metadata, and the family whose files have it
    other_value: int | None = None  # what that key says in the other family's files; None: anything
    other_archs: tuple[str, ...] = ()  # further names of the architecture
    variant: Rules = field(default_factory=dict)  # in the place of `rules`' where a file has such names

    def rules_for(self, names: Collection[str]) -> Rules:
        """The rules for a file with tensors of these names."""
        endings = {name.partition("blk.")[2].lstrip("0123456789") for name in names}
        used = {ours: rule for ours, rule in self.variant.items() if rule.pattern.partition("{i}")[2] in endings}
        return {**self.rules, **used}


@dataclass(frozen=True)
class Family:
    name: str
    model_types: tuple[str, ...]  # of config.json
    defaults: Mapping[str, Any]  # what transformers assumes where config.json is silent
    hf_rules: Rules
    gguf: GGUFTraits | None = None  # None: its files in GGUF are not implemented
    qkv_bias: bool | str = False  # or the config key that says
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
    exceeds_float16: bool = False  # some of its models' numbers are larger than 65,504
    has_local_rope: bool = False  # windowed layers rotate with a base of their own and without scaling
    has_partial_rotary: bool = False
    has_rope_sections: bool = False  # for pictures; positions of text turn all sections alike
    windows: Callable[[ConfigFields, int], Windows] = no_windows
    experts: Callable[[ConfigFields, int], MoeSpec | None] = no_experts
    is_latent: bool = False  # attention is latent attention (MLA)
    convolution: Callable[[ConfigFields, int], ShortConv | None] = no_convolution  # of a layer, in attention's place
    # What a layer's attention, a layer, and the model have beside what all families have in common:
    adjust_attention: Callable[[ConfigFields, int, Gqa], Gqa] = same_attention
    adjust_layer: Callable[[ConfigFields, int, LayerSpec], LayerSpec] = same_layer
    adjust_model: Callable[[ConfigFields, ModelSpec], ModelSpec] = same_model
    common_keys: Callable[[Mapping[str, Any]], Mapping[str, Any]] = as_it_is  # config.json in other families' words
    refused_flags: tuple[str, ...] = ()  # config keys that must be absent, false or null
    hf_variant: Rules = field(default_factory=dict)  # in the place of `hf_rules`' where a checkpoint has such names
    hf_prefixes: tuple[str, ...] = ("model.",)  # before "layers.", in order of likelihood
    ignored_prefixes: tuple[str, ...] = field(default=())  # tensors of parts that text generation leaves out
    mtp: MtpNames | None = None  # None: its heads that predict further tokens are not implemented, or there are none

    @property
    def gguf_traits(self) -> GGUFTraits:
        if self.gguf is None:
            raise UnsupportedModel(f"{self.name}: GGUF files of this family are not implemented")
        return self.gguf


# ── sliding windows ────────────────────────────────────────────────────────────────────────────────


def refuse_others(fields: ConfigFields, kinds: tuple[str, ...], *known: str) -> None:
    """Refuse kinds of layers that are not known."""
    for kind in sorted(set(kinds) - set(known)):
        fields.refuse(f"layer type {kind!r} is not implemented")


def _windows(fields: ConfigFields, num_layers: int, is_sliding: Callable[[int], bool]) -> Windows:
    window = fields.integer_or_none("sliding_window")
    kinds = fields.words("layer_types", num_layers)
    if kinds is None:
        return tuple(window if is_sliding(index) else None for index in range(num_layers))
    refuse_others(fields, kinds, "sliding_attention", "full_attention")
    if window is None and "sliding_attention" in kinds:
        fields.refuse("layer_types asks for windows, but sliding_window is missing")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def every_layer(fields: ConfigFields, num_layers: int) -> Windows:
    return _windows(fields, num_layers, lambda index: True)


def when_used(fields: ConfigFields, num_layers: int) -> Windows:
    """Every layer, where `use_sliding_window` is set."""
    is_used = fields.flag("use_sliding_window")
    return _windows(fields, num_layers, lambda index: is_used)


def upper_layers(fields: ConfigFields, num_layers: int) -> Windows:
    """From layer `max_window_layers` on, where `use_sliding_window` is set."""
    is_used = fields.flag("use_sliding_window")
    first = fields.integer("max_window_layers", minimum=0)
    return _windows(fields, num_layers, lambda index: is_used and index >= first)


def named_layers(fields: ConfigFields, num_layers: int) -> Windows:
    """Those that `layer_types` names."""
    return _windows(fields, num_layers, lambda index: False)


def alternating(fields: ConfigFields, num_layers: int) -> Windows:
    """All but every n-th layer, n being `sliding_window_pattern`, unless the layers are named."""
    key = "_sliding_window_pattern" if fields.has("_sliding_window_pattern") else "sliding_window_pattern"
    pattern = 1 if fields.has("layer_types") else fields.integer(key)
    return _windows(fields, num_layers, lambda index: (index + 1) % pattern != 0)
