"""Reader of a checkpoint's quantisation: `quantization_config` of config.json, or hf_quant_config.json.

Every quantiser uses its own keys. They are read into one `Quantization`: which matrices are stored in which format.
Unsupported settings are refused by name. Settings of activations are ignored, because the engine quantises activations
in its own way (`docs/design/quantisation.md`).

    gptq, awq, auto-round    integers with a scale and a zero point for each group of columns
    compressed-tensors       pack-quantized, int-quantized, float-quantized, naive-quantized, mxfp4, mxfp8, nvfp4; mixed
    fp8, fbgemm_fp8          e4m3 with scales of blocks, rows or whole matrices
    modelopt                 FP8, NVFP4, or either one per matrix
    bitsandbytes             nf4, fp4, int8
    hqq                      integers with a floating-point scale and zero point
    mxfp4                    experts of gpt-oss
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NoReturn

from tokenmill.arch.fields import ConfigFields

HINT = "use the unquantised checkpoint, a GGUF, or one of the formats in docs/models.md"
GPTQ_BITS = (2, 3, 4, 8)
ROW = 0  # group: a whole row of a matrix
MAX_EXPRESSION = 200  # characters of a regular expression
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEATS = re.compile(r"[*+{]")


@dataclass(frozen=True)
class Scheme:
    """The storage format of some matrices."""

    quant: str  # the block format that they are converted to (`block_formats.py`)
    group: int = ROW  # columns that share a scale
    is_expanded: bool = False  # dequantized on a GPU, because no kernel computes with them exactly
    bits: int = 0  # of integers
    is_ordered: bool = False  # act order: columns of a group need not be neighbours
    is_expanded_on_cpu: bool = False  # dequantized on a CPU too, because no block format can store them


@dataclass(frozen=True)
class Quantization:
    """The quantisation of a checkpoint's matrices, from its config."""

    method: str  # description for messages
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]  # (patterns of modules, their scheme); the first match applies
    excluded: tuple[str, ...] = ()  # patterns of modules that are not quantised

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a module, named as in the checkpoint and without ".weight"; None: not quantised."""
        place = self._lookup.first_match(module)
        return self.schemes[place - 1][1] if place else None

    @cached_property
    def _lookup(self) -> _Lookup:
        return _Lookup([self.excluded, *(patterns for patterns, _ in self.schemes)])


class _Lookup:
    """Lists of patterns, of which the first one that matches a module is found. Checkpoints list thousands of modules,
    so names are looked up instead of being compared with each."""

    def __init__(self, lists: Sequence[tuple[str, ...]]) -> None:
        self._by_name: dict[str, int] = {}  # parts of dotted names: the first list that has them
        self._others: list[tuple[int, str]] = []  # other patterns: their list
        for place, patterns in enumerate(lists):
            for pattern in patterns:
                if pattern == "Linear" or pattern.startswith("re:") or "*" in pattern:
                    self._others.append((place, pattern))
                else:
                    self._by_name.setdefault(pattern, place)

    def first_match(self, module: str) -> int | None:
        """Return the place of the first list with a pattern that matches a module."""
        names = {module, module.replace("model.", "model.language_model.", 1)}
        parts = {part for name in names for part in _parts_of(name)}
        best = min((self._by_name[part] for part in parts & self._by_name.keys()), default=None)
        for place, pattern in self._others:
            if best is not None and best <= place:
                break
            if _fits(pattern, module, names):
                return place
        return best


def _fits(pattern: str, module: str, names: set[str]) -> bool:
    """Return whether a module matches a glob, a regular expression or the class Linear."""
    if pattern == "Linear":
        return True
    if pattern.startswith("re:"):
        return _matches(pattern[3:], module)
    return any(fnmatchcase(name, pattern) for name in names)


def _parts_of(name: str) -> Iterator[str]:
    """Return every part of a dotted name: "a.b" has the parts "a", "b" and "a.b"."""
    words = name.split(".")
    return (".".join(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1))


def _matches(expression: str, module: str) -> bool:
    """Match a regular expression from a file; one that could take very long counts as no match."""
    if len(expression) > MAX_EXPRESSION or _REPEATED_GROUP.search(expression) or len(_REPEATS.findall(expression)) > 8:
        return False
    try:
        return re.match(expression, module) is not None
    except re.error:
        return False


def read_quantization(config: Mapping[str, Any], source: str = "quantization_config") -> Quantization:
    """Read a quantization_config, or the "quantization" of an hf_quant_config.json."""
    fields = ConfigFields(config, source)
    method = config.get("quant_method") or ("modelopt" if "quant_algo" in config else "unknown")
    if method == "fp8" and "quant_algo" in config:
        method = "modelopt"
    if method not in _METHODS:
        known = ", ".join(_METHODS)
        fields.refuse(f"quantization_config {method!r} is not supported", hint=f"these are: {known}; {HINT}")
    return _METHODS[method](fields)


def _patterns(fields: ConfigFields, *keys: str) -> tuple[str, ...]:
    """Return the patterns of modules under the first of these keys that is set."""
    for key in keys:
        value = fields.get(key)
        if value:
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                fields.refuse(f"{key} is {str(value)[:80]}, expected a list of strings")
            return tuple(value)
    return ()


def _group(fields: ConfigFields, default: int) -> int:
    size = fields.get("group_size")
    size = default if size is None else size
    if not isinstance(size, int) or size == 0 or size < -1:
        fields.refuse(f"group_size is {size!r}, expected a number of columns or -1")
    return ROW if size == -1 else size


def _wrong_bits(fields: ConfigFields, method: str, bits: object, known: str) -> NoReturn:
    fields.refuse(f"{method} of {bits} bits is not supported: {known} are", hint=HINT)


def _integers(bits: int, group: int, *, symmetric: bool, is_ordered: bool = False) -> Scheme:
    names = ("Q4_0", "G4") if bits <= 4 else ("Q8_0", "G8")
    quant = names[0] if symmetric and bits in (4, 8) else names[1]
    return Scheme(quant, group, bits=bits, is_ordered=is_ordered)


def _gptq(fields: ConfigFields) -> Quantization:
    bits, form = fields.get("bits"), fields.get("checkpoint_format") or "gptq"
    if bits not in GPTQ_BITS:
        _wrong_bits(fields, "gptq", bits, "2, 3, 4 and 8")
    if form not in ("gptq", "gptq_v2"):
        fields.refuse(f"gptq's checkpoint_format {form!r} is not supported: gptq and gptq_v2 are", hint=HINT)
    if fields.get("dynamic"):
        fields.refuse("gptq with different settings for some modules (dynamic) is not supported", hint=HINT)
    group = _group(fields, 128)
    is_shuffled = bool(fields.get("desc_act")) and group != ROW
    scheme = _integers(bits, group, symmetric=fields.get("sym") is not False, is_ordered=is_shuffled)
    return Quantization(f"GPTQ, {bits} bits", ((("Linear",), scheme),), _whole_head(fields))


def _awq(fields: ConfigFields) -> Quantization:
    bits, layout = fields.get("bits") or fields.get("w_bit"), str(fields.get("version") or "gemm").lower()
    if bits not in (4, 8):
        _wrong_bits(fields, "awq", bits, "4 and 8")
    if layout != "gemm":
        fields.refuse(f"awq of {bits} bits, layout {layout!r}, is not supported: gemm is", hint=HINT)
    scheme = _integers(bits, _group(fields, 128), symmetric=fields.get("zero_point") is False)
    excluded = (*_patterns(fields, "modules_to_not_convert"), *_whole_head(fields))
    return Quantization(f"AWQ, {bits} bits", ((("Linear",), scheme),), excluded)


def _auto_round(fields: ConfigFields) -> Quantization:
    packing = str(fields.get("packing_format") or "auto_round:auto_gptq")
    if fields.get("extra_config"):
        fields.refuse("auto-round with different settings for some modules (extra_config) is not supported", hint=HINT)
    if packing.endswith("awq"):
        return _awq(ConfigFields({**fields.values, "zero_point": fields.get("sym") is False}, fields.source))
    if not packing.endswith("gptq"):
        fields.refuse(f"auto-round's packing_format {packing!r} is not supported: gptq's and awq's are", hint=HINT)
    return _gptq(fields)


def _whole_head(fields: ConfigFields) -> tuple[str, ...]:
    return () if fields.get("lm_head") else ("lm_head",)


def _fp8(fields: ConfigFields) -> Quantization:
    form = str(fields.get("fmt") or "e4m3").removeprefix("float8_").removesuffix("fn")
    if form != "e4m3":
        fields.refuse(f"fp8 in {form} is not supported: e4m3 is", hint=HINT)
    blocks = _fp8_block(fields)
    excluded = _patterns(fields, "modules_to_not_convert", "ignored_layers")
    method = "fp8" if blocks is None else f"fp8, blocks of {blocks[0]} × {blocks[1]}"
    schemes: list[tuple[tuple[str, ...], Scheme]] = [(("Linear",), Scheme("F8", ROW if blocks is None else blocks[1]))]
    if fields.get("expert_dtype") == "fp4":
        schemes.insert(0, (("experts",), Scheme("MXFP4", 32)))
        method += ", experts in MXFP4"
    return Quantization(method, tuple(schemes), excluded)


def block_sizes(config: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return the sizes (rows, columns) of all blocks with a common scale in a quantization_config."""
    found = []
    if config.get("weight_block_size") is not None:
        found.append(_fp8_block(ConfigFields(config, "quantization_config")))
    for group in (config.get("config_groups") or {}).values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("strategy") == "block":
            size = {"weight_block_size": weights.get("block_structure") or [128, 128]}
            found.append(_fp8_block(ConfigFields(size, "block_structure")))
        elif isinstance(weights, dict) and isinstance(weights.get("group_size"), int) and weights["group_size"] > 0:
            found.append((1, weights["group_size"]))
    if config.get("quant_algo") in ("FP8_PB_WO", "MIXED_PRECISION"):
        found.append((128, 128))
    return tuple(size for size in found if size is not None)


def _fp8_block(fields: ConfigFields) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale; None: they follow from the scales' shape."""
    size = fields.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(isinstance(one, int) and one > 0 for one in size):
        fields.refuse(f"weight_block_size is {str(size)[:80]}, expected two numbers above zero")
    return size[0], size[1]


def _compressed_tensors(fields: ConfigFields) -> Quantization:
    default_format = fields.get("format") or "dense"
    for key in ("sparsity_config", "transform_config"):
        section = fields.get(key)
        if isinstance(section, dict) and section and section.get("format") != "dense":
            fields.refuse(f"compressed-tensors with a {key} is not supported", hint=HINT)
    groups = fields.section("config_groups") or {}
    schemes = []
    for name, group in groups.items():
        section = group if isinstance(group, dict) else {}
        weights = section.get("weights")
        if not isinstance(weights, dict):
            continue  # only activations
        inner = ConfigFields(weights, f"{fields.source}, {name}")
        targets = _patterns(ConfigFields(section, inner.source), "targets") or ("Linear",)
        schemes.append((targets, _compressed_scheme(inner, str(section.get("format") or default_format))))
    method = f"compressed-tensors, {default_format}"
    return Quantization(method, tuple(schemes), _patterns(fields, "ignore"))


COMPRESSED_INTEGERS = ("pack-quantized", "int-quantized", "naive-quantized")
COMPRESSED_FLOATS = ("float-quantized", "naive-quantized", "mxfp8-quantized")
COMPRESSED_FP4 = {"nvfp4-pack-quantized": "NV4D", "mxfp4-pack-quantized": "MXFP4"}


def _compressed_scheme(weights: ConfigFields, form: str) -> Scheme:
    bits, kind = weights.integer("num_bits"), weights.get("type") or "int"
    strategy = weights.get("strategy") or "tensor"
    if kind == "float" and form in COMPRESSED_FP4 and bits == 4:
        return Scheme(COMPRESSED_FP4[form], 16 if form.startswith("nv") else 32)
    if kind == "float" and form in COMPRESSED_FLOATS and bits == 8:
        block = weights.get("block_structure")
        columns = block[1] if isinstance(block, list) and len(block) == 2 else 128 if strategy == "block" else ROW
        return Scheme("F8", weights.integer("group_size") if strategy == "group" else columns)
    if kind != "int" or form not in COMPRESSED_INTEGERS or bits > 8:
        weights.refuse(f"compressed-tensors' {form} of {bits} bits ({kind}) is not supported", hint=HINT)
    group = weights.integer("group_size") if strategy == "group" else ROW
    is_shuffled = weights.get("actorder") in ("group", True)
    symmetric = weights.get("symmetric") is not False
    return _integers(bits, group, symmetric=symmetric, is_ordered=is_shuffled)


_ALGORITHMS = {
    "FP8": Scheme("F8"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("F8"),
    "FP8_PB_WO": Scheme("F8", 128),
    "NVFP4": Scheme("NV4", 16),
    "W4A16_NVFP4": Scheme("NV4", 16),
    "NVFP4_AWQ": Scheme("NV4", 16),
}


def _modelopt(fields: ConfigFields) -> Quantization:
    algorithm = fields.get("quant_algo")
    excluded = _patterns(fields, "exclude_modules", "ignore")
    if algorithm == "MIXED_PRECISION":
        layers = fields.section("quantized_layers") or {}
        schemes = tuple(
            ((name,), _algorithm(ConfigFields(one if isinstance(one, dict) else {}, f"{fields.source}, {name}")))
            for name, one in layers.items()
        )
        return Quantization("ModelOpt, mixed", schemes, excluded)
    return Quantization(f"ModelOpt, {algorithm}", ((("Linear",), _algorithm(fields)),), excluded)


def _algorithm(fields: ConfigFields) -> Scheme:
    algorithm = fields.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        known = ", ".join(_ALGORITHMS)
        fields.refuse(f"ModelOpt's quant_algo {algorithm!r} is not supported: these are: {known}", hint=HINT)
    return _ALGORITHMS[algorithm]


def _bitsandbytes(fields: ConfigFields) -> Quantization:
    excluded = _patterns(fields, "llm_int8_skip_modules") or ("lm_head",)
    if fields.get("load_in_8bit") or fields.get("_load_in_8bit"):
        return Quantization("bitsandbytes, int8", ((("Linear",), Scheme("G8")),), excluded)
    kind = str(fields.get("bnb_4bit_quant_type") or "fp4")
    if kind not in ("nf4", "fp4"):
        fields.refuse(f"bitsandbytes' bnb_4bit_quant_type {kind!r} is not supported: nf4 and fp4 are", hint=HINT)
    return Quantization(f"bitsandbytes, {kind}", ((("Linear",), Scheme(kind.upper(), 64)),), excluded)


def _hqq(fields: ConfigFields) -> Quantization:
    settings = fields.section("quant_config") or {}
    weights = settings.get("weight_quant_params", settings)
    if not isinstance(weights, dict) or "nbits" not in weights:
        fields.refuse("hqq without one setting for all modules (weight_quant_params) is not supported", hint=HINT)
    inner = ConfigFields(weights, fields.source)
    bits = inner.integer("nbits")
    if bits not in (1, 2, 3, 4, 8):
        _wrong_bits(fields, "hqq", bits, "1, 2, 3, 4 and 8")
    axis = weights.get("axis", 0)
    has_no_blocks = axis != 1
    scheme = Scheme(
        "G4" if bits <= 4 else "G8", _group(inner, 64), is_expanded=has_no_blocks, is_expanded_on_cpu=has_no_blocks
    )
    return Quantization(f"HQQ, {bits} bits", ((("Linear",), scheme),), _patterns(fields, "skip_modules"))


def _mxfp4(fields: ConfigFields) -> Quantization:
    excluded = _patterns(fields, "modules_to_not_convert")
    return Quantization("MXFP4 experts", ((("experts",), Scheme("MXFP4", 32)),), excluded)


_METHODS: Mapping[str, Callable[[ConfigFields], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "hqq": _hqq,
    "mxfp4": _mxfp4,
}
