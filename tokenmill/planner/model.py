"""The model of a plan, from a config, a GGUF file or a name: its shape and the size of its weights, without the
weights.

A config of quantised weights is planned with the shape of the unquantised model and the precision in the config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import mode
from typing import Any

from tokenmill.arch.cost import DTYPE_BYTES, WeightParts, weight_parts
from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME
from tokenmill.arch.gguf_mixes import MIXES, mixed_parts
from tokenmill.arch.outline import Model
from tokenmill.arch.outlines import outline_from_hf
from tokenmill.arch.packed_formats import StoredFormat, configured_formats
from tokenmill.arch.quantization import Scheme, read_quantization
from tokenmill.arch.read import quantization_config, read_json, read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.engine.backends import TRITON, KeptWeights, StoredWeights
from tokenmill.errors import InvalidConfig, UnknownModel, UnsupportedModel
from tokenmill.ops.compute_request import ComputeRequest
from tokenmill.store import resolve_model
from tokenmill.store.catalog import find_entry

GPU_DTYPE = "bfloat16"  # of activations beside weights that stay quantised
PLAIN_DTYPES = ("float32", "bfloat16", "float16")
_QUANTISED = re.compile(r"[.-](((?:Q\d_(?:K|\d)|F16|BF16))(?:_[SML])?)\.GGUF$")


@dataclass(frozen=True)
class PlannedModel:
    name: str
    spec: Model  # an outline where the engine does not run the model
    stored_dtype: str  # of most weights
    stored: WeightParts | None = None  # as stored in a file; None for a config alone
    kept: WeightParts | None = None  # as a GPU keeps a file or a quantised config; None for others
    expands_weights: bool = False  # a GPU keeps quantised matrices and expands them, a piece at a time, for large steps

    def weights(self, asked: str, computed: str | None = None) -> WeightParts:
        """Return the weights in the given precision; `auto` is as stored, or as a GPU that computes in `computed` keeps
        them."""
        dtype = self.dtype(asked, computed)
        as_kept = self.stored if computed is None else self.kept
        if asked == "auto" and as_kept is not None and (computed is None or dtype != "float32"):
            return as_kept
        if dtype == "mxfp4":  # a format of experts only
            return weight_parts(self.spec, "bfloat16", expert_dtype=dtype)
        require_known(dtype, "weight_dtype")
        return weight_parts(self.spec, dtype, vector_dtype=_vector(dtype))

    def dtype(self, asked: str, computed: str | None = None) -> str:
        """Type of most weights; plain ones on a GPU take the type they are computed in, in float32 all of them do."""
        if asked != "auto":
            return asked
        is_expanded = computed == "float32" or (computed is not None and self.stored_dtype in PLAIN_DTYPES)
        return computed if computed is not None and is_expanded else self.stored_dtype


def require_known(dtype: str, param: str) -> None:
    if dtype not in DTYPE_BYTES and dtype not in GGML_TYPE_BY_NAME:
        known = ", ".join([*DTYPE_BYTES, "Q8_0", "Q4_K"])
        raise InvalidConfig(f"{param}: unknown type {dtype!r}; some are {known}", param=param)


def _vector(dtype: str) -> str | None:
    """Return the dtype of norms and biases, which are never quantised."""
    if dtype in ("fp8", "int8", "int4", "mxfp4", "nvfp4"):
        return "bfloat16"
    return "float32" if dtype in GGML_TYPE_BY_NAME else None


def find_model(name: str) -> PlannedModel:
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".json":
        return model_from_config(path, path.stem.removesuffix("_config"))
    try:
        resolved = resolve_model(name, allow_pull=False)
    except UnknownModel:
        known = known_model(name)
        if known is None:
            raise
        return known
    return model_at(resolved.path, resolved.name)


def known_model(name: str) -> PlannedModel | None:
    """A model of the catalog, or a well-known one of the hub, from what the package knows of it: nothing is fetched."""
    entry = find_entry(name)
    wanted = name if entry is None else entry.config or ""
    config = next((config for known, config in known_configs().items() if known.lower() == wanted.lower()), None)
    if config is None:
        return None
    model = _from_config(dict(config), name if entry is None else entry.name)
    quantised = None if entry is None else _QUANTISED.search(entry.file.upper())
    if entry is None or quantised is None or quantised[2] not in GGML_TYPE_BY_NAME:
        return model
    if not isinstance(model.spec, ModelSpec) or (quantised[1] not in MIXES and quantised[1] not in GGML_TYPE_BY_NAME):
        return replace(model, stored_dtype=quantised[2])
    parts = mixed_parts(model.spec, quantised[1], repeats_head=entry.repeats_head)
    return replace(model, stored_dtype=quantised[2], stored=parts, kept=parts)


@cache
def known_configs() -> dict[str, dict[str, Any]]:
    """Hub id → the fields of its config.json that say how large a model is."""
    found = json.loads(files("tokenmill.planner").joinpath("known_models.json").read_text(encoding="utf-8"))
    return dict(found)


def model_at(path: Path, name: str) -> PlannedModel:
    if path.is_dir() and (path / "config.json").is_file():
        return model_from_config(path / "config.json", name)
    if path.suffix != ".gguf":
        path = next(iter(sorted(path.glob("*.gguf"))), path)
    stored = StoredWeights(read_spec(path), path)
    kept = _kept_on_gpu(stored)
    return PlannedModel(name, stored.spec, stored.dtype, stored.parts, kept.parts, kept.expands_weights)


def _kept_on_gpu(stored: StoredWeights) -> KeptWeights:
    return TRITON.kept_weights(stored, ComputeRequest(stored.spec, "cuda", GPU_DTYPE, GPU_DTYPE))


def model_from_config(path: Path, name: str) -> PlannedModel:
    config = read_json(path)
    config["quantization_config"] = quantization_config(path)
    return _from_config(config, name)


def _from_config(config: dict[str, Any], name: str) -> PlannedModel:
    quantisation = config.pop("quantization_config", None)
    model = outline_from_hf(config)
    if not isinstance(quantisation, dict) or not quantisation:
        return PlannedModel(name, model, plain_dtype(model))
    dtype = quantised_dtype(quantisation)
    formats = _formats(model, quantisation) if isinstance(model, ModelSpec) else {}
    if not isinstance(model, ModelSpec) or not (formats or _is_expanded_on_gpu(quantisation)):
        return PlannedModel(name, model, dtype)
    kept = _kept_on_gpu(StoredWeights(model, None, formats))
    return PlannedModel(name, model, dtype, kept=kept.parts, expands_weights=kept.expands_weights)


def _formats(model: ModelSpec, quantisation: dict[str, Any]) -> Mapping[str, StoredFormat]:
    """Formats of matrices; none where weights so quantised are planned but not computed with."""
    try:
        return configured_formats(model, quantisation)
    except UnsupportedModel:
        return {}


def _is_expanded_on_gpu(quantisation: dict[str, Any]) -> bool:
    return any(scheme.is_expanded for scheme in _schemes(quantisation))


def _schemes(quantisation: dict[str, Any]) -> list[Scheme]:
    """How matrices are stored; none where weights so quantised are planned but not computed with."""
    try:
        return [scheme for _, scheme in read_quantization(quantisation).schemes]
    except UnsupportedModel:
        return []


def plain_dtype(spec: Model) -> str:
    return spec.dtype if spec.dtype in DTYPE_BYTES else "bfloat16"


_DTYPES = {
    **dict.fromkeys(("Q4_0", "G4", "NF4", "FP4"), "int4"),
    **dict.fromkeys(("Q8_0", "G8", "B8"), "int8"),
    **dict.fromkeys(("NV4", "NV4D"), "nvfp4"),
    "MXFP4": "mxfp4",
    "F8": "fp8",
}


def quantised_dtype(config: dict[str, Any]) -> str:
    """Return the data type of most matrices."""
    schemes = _schemes(config)
    if schemes:
        return mode("bfloat16" if scheme.is_expanded_on_cpu else _DTYPES[scheme.quant] for scheme in schemes)
    method = str(config.get("quant_method", config.get("quant_algo", ""))).lower()
    algorithm = str(config.get("quant_algo", "")).lower()
    for four_bits in ("mxfp4", "nvfp4"):
        if four_bits in (method, algorithm):
            return four_bits
    if "fp4" in method or "fp4" in algorithm or config.get("bits") == 4:
        return "int4"
    return "fp8" if "fp8" in method or "fp8" in algorithm or method == "modelopt" else "int8"
