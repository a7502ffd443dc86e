"""Sampling parameters recommended by a model's authors, used as defaults of requests: from the generation_config.json
next to its weights, or else from the catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenmill.arch.read import read_json
from tokenmill.errors import InvalidRequest, ModelError
from tokenmill.observe.log import get_log
from tokenmill.params import SamplingParams
from tokenmill.store.catalog import find_entry

log = get_log("engine")
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(name: str, path: Path) -> dict[str, Any]:
    """Return the recommended arguments of `SamplingParams`; none if there are none, or, with a warning, if one is
    invalid."""
    entry = find_entry(name)
    settings = _generation_config(path) or ({} if entry is None else entry.sampling)
    found = {key: settings[key] for key in NAMES if settings.get(key) is not None}
    try:
        SamplingParams(**found)
    except InvalidRequest as problem:
        log.warning("the model's own sampling settings are not used: %s", problem)
        return {}
    return found


def _generation_config(path: Path) -> dict[str, Any]:
    folder = path if path.is_dir() else path.parent
    file = folder / "generation_config.json"
    if path.suffix == ".gguf" or not file.is_file():
        return {}
    try:
        return read_json(file)
    except ModelError as problem:
        log.warning("%s", problem)
        return {}
