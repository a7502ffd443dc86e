"""`tokenmill pull`, `list` and `rm`: download, list and delete models.

An interrupted download is resumed.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from tokenmill.cli.output import PullScreen, print_table, size
from tokenmill.errors import InvalidRequest
from tokenmill.store import DEFAULT_MODEL, LocalModel, Store, load_catalog, parse_name, plain_name, pull


def pull_models(*models: str) -> int:
    """Download models; without a name, the default model.

    Parameters
    ----------
    models
        Short names (`tokenmill list --catalog`) or Hugging Face ids: owner/name, owner/name:Q4_K_M.
    """
    store = Store()
    for name in models or (DEFAULT_MODEL,):
        model = parse_name(name)
        if isinstance(model, LocalModel):
            raise InvalidRequest(f"{name} is already on this machine", hint=f"tokenmill run {name}")
        with PullScreen() as screen:
            manifest = pull(model, store, screen)
        print(f"{manifest.name}  {size(manifest.size_bytes)}  from {manifest.source}")
    return 0


Flag = Annotated[bool, Parameter(negative="")]


# ── list ─────────────────────────────────────────────────────────────────────────────────────────────


def list_models(*, catalog: Flag = False, json: Flag = False) -> int:
    """List downloaded models.

    Parameters
    ----------
    catalog
        List the models of the catalog instead, which can be downloaded by their short names.
    json
        Print one JSON array.
    """
    rows = _catalog_rows() if catalog else _store_rows()
    if json:
        print(msgspec.json.encode(rows).decode())
    elif catalog:
        print_table(("NAME", "SIZE", "LICENCE", "HERE", "ABOUT"), [_offered_in_words(row) for row in rows])
    elif rows:
        print_table(("NAME", "SIZE", "PULLED", "FROM"), [_stored_in_words(row) for row in rows])
    else:
        print("there are no models yet; `tokenmill pull` downloads the default model")
    return 0


def _store_rows() -> list[dict[str, Any]]:
    return [
        {"name": m.name, "size_bytes": m.size_bytes, "pulled_at_s": m.pulled_at_s, "source": m.source}
        for m in Store().manifests()
    ]


def planned_bytes(name: str) -> int:
    """Estimate the file size of a catalog model from its shape and the types of its tensors."""
    from tokenmill.arch.gguf_mixes import file_bytes
    from tokenmill.planner.model import known_model

    model = known_model(name)
    return 0 if model is None else file_bytes(model.weights("auto"), model.spec.vocab_size)


def _catalog_rows() -> list[dict[str, Any]]:
    here = set(Store().names())
    return [
        {
            "name": e.name,
            "about": e.about,
            "license": e.license,
            "repo": e.repo,
            "file": e.file,
            "here": e.name in here,
            "size_bytes": e.size_bytes,
            "planned_bytes": planned_bytes(e.name),
            "aliases": e.aliases,
        }
        for e in load_catalog().values()
    ]


def _offered_in_words(row: dict[str, Any]) -> tuple[str, ...]:
    shown = size(row["size_bytes"]) if row["size_bytes"] else f"~{size(row['planned_bytes'])}"
    return row["name"], shown, row["license"], "yes" if row["here"] else "", row["about"]


def _stored_in_words(row: dict[str, Any]) -> tuple[str, ...]:
    pulled = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["pulled_at_s"]))
    return row["name"], size(row["size_bytes"]), pulled, row["source"]


# ── rm ───────────────────────────────────────────────────────────────────────────────────────────────


def remove_models(model: str, /, *more: str) -> int:
    """Delete downloaded models. Files that another model uses are kept.

    Parameters
    ----------
    model
        Name shown by `tokenmill list`.
    more
        Further names.
    """
    from tokenmill.weights.packed_cache import prune

    store = Store()
    for name in (model, *more):
        stored = _stored_name(name, store)
        freed = store.remove(stored) + prune()  # including its packed weights
        print(f"removed {stored}, {size(freed)} freed")
    return 0


def _stored_name(name: str, store: Store) -> str:
    if plain_name(name) in store.names():
        return plain_name(name)
    named = parse_name(name)
    if isinstance(named, LocalModel):
        raise InvalidRequest(f"{name} is a path, not a model in the store", hint="delete the file yourself")
    return named.name
