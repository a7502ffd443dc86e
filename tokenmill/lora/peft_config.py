"""The settings of a PEFT adapter (adapter_config.json), read strictly: a setting that affects answers is applied or
refused.

The scale of an update is alpha / rank, with rsLoRA alpha / sqrt(rank). `rank_pattern` and `alpha_pattern` override both
for some modules: the first key that matches the end of a module's name, as a regular expression, applies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.arch.fields import ConfigFields
from tokenmill.errors import UnsupportedModel

# Keys that do not affect what the adapter computes, or that are read below.
_KNOWN = frozenset(
    (
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out"),
        *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout"),
        *("megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern"),
        *("revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_dora", "use_rslora"),
    )
)
# Initialisations for training that do not change the base model; adapters with others need the changed base model.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
MAX_PATTERNS = 4096
MAX_PATTERN_CHARS = 1000


@dataclass(frozen=True)
class PeftConfig:
    place: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]
    is_rank_stabilised: bool
    is_dora: bool
    target_modules: tuple[str, ...] | str | None  # names, or a regular expression of whole names
    exclude_modules: tuple[str, ...] | str | None
    layers: tuple[int, ...] | None  # only these
    target_parameters: tuple[str, ...]
    is_for_transposed: bool = False  # `fan_in_fan_out`: the adapted matrices are stored transposed

    def rank_of(self, module: str) -> int:
        value = _by_pattern(self.rank_pattern, module, self.rank)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedModel(f"{self.place}: rank_pattern gives {module} the rank {value!r}")
        return value

    def scale_of(self, module: str) -> float:
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise UnsupportedModel(f"{self.place}: alpha_pattern gives {module} the alpha {alpha!r}")
        return float(alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank)

    def targets(self, module: str) -> bool:
        """Return whether the config names a module as changed by the adapter."""
        if self.exclude_modules is not None and _names(self.exclude_modules, module):
            return False
        if self.target_modules is None or self.target_modules == "all-linear":
            return False  # the config does not name modules; the file's tensors do
        number = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        if self.layers is not None and (number is None or int(number[1]) not in self.layers):
            return False
        return _names(self.target_modules, module)


def _names(targets: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in targets)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_peft_config(values: Mapping[str, Any], place: str) -> PeftConfig:
    fields = ConfigFields(values, place, {"use_rslora": False, "use_dora": False, "bias": "none", "lora_alpha": 8})
    if (kind := fields.text("peft_type")) != "LORA":
        fields.refuse(f"peft_type {kind} is not implemented", hint="adapters are LoRA, rsLoRA or DoRA")
    if (bias := fields.text("bias")) != "none":
        fields.refuse(f"bias {bias!r} is not implemented: adapters with trained biases change more than matrices")
    if fields.get("modules_to_save"):
        fields.refuse(f"modules_to_save {fields.get('modules_to_save')!r} is not implemented: such modules are whole")
    start = fields.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        hint = "convert it to a plain LoRA when saving (path_initial_model_for_weight_conversion)"
        fields.refuse(f"init_lora_weights {start!r} is not implemented: it changes the base model too", hint=hint)
    for key in sorted(values.keys() - _KNOWN):
        if values[key] not in (None, False, {}, [], ""):
            fields.refuse(f"{key} is not implemented")
    layers = fields.integers("layers_to_transform")
    if layers and fields.get("layers_pattern"):
        fields.refuse("layers_pattern is not implemented")
    return PeftConfig(
        place,
        rank=fields.integer("r"),
        alpha=fields.number("lora_alpha"),
        rank_pattern=_patterns(fields, "rank_pattern"),
        alpha_pattern=_patterns(fields, "alpha_pattern"),
        is_rank_stabilised=fields.flag("use_rslora"),
        is_dora=fields.flag("use_dora"),
        target_modules=_modules(fields, "target_modules"),
        exclude_modules=_modules(fields, "exclude_modules"),
        layers=layers or None,
        target_parameters=_words(fields, "target_parameters"),
        is_for_transposed=bool(fields.get("fan_in_fan_out")),
    )


def _patterns(fields: ConfigFields, key: str) -> dict[str, Any]:
    found = fields.section(key) or {}
    if len(found) > MAX_PATTERNS:
        fields.refuse(f"{key} has {len(found)} entries, more than {MAX_PATTERNS}")
    for pattern in found:
        _require_pattern(fields, key, pattern)
    return found


def _require_pattern(fields: ConfigFields, key: str, pattern: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARS:
        fields.refuse(f"{key} has a pattern of {len(pattern)} characters, more than {MAX_PATTERN_CHARS}")
    try:
        re.compile(pattern)
    except re.error as error:
        fields.refuse(f"{key} has the pattern {pattern[:80]!r}, which is not a regular expression: {error}")


def _modules(fields: ConfigFields, key: str) -> tuple[str, ...] | str | None:
    value = fields.get(key)
    if not isinstance(value, str):
        return _words(fields, key) or None
    _require_pattern(fields, key, value)
    return value


def _words(fields: ConfigFields, key: str) -> tuple[str, ...]:
    value = fields.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        fields.refuse(f"{key} is {str(value)[:80]}, expected a list of strings")
    return tuple(value)
