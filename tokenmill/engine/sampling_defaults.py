"""Sampling parameters that a model's makers recommend, for requests that don't say: from generation_config.json beside
its weights, or from the catalog for files that carry none."""

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
    """Arguments of `SamplingParams`; empty where nothing is known. Values that make no sense are left out, with a
    warning."""
    entry = find_entry(name)
    given = _generation_config(path) or ({} if entry is None else entry.sampling)
    found = {key: given[key] for key in NAMES if given.get(key) is not None}
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
