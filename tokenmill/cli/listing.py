"""`tokenmill list`: what is in the store, or what the catalog offers."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from tokenmill.cli.screen import print_table, size
from tokenmill.store import Store, load_catalog

Flag = Annotated[bool, Parameter(negative="")]


def command(*, catalog: Flag = False, json: Flag = False) -> int:
    """List the models in the store.

    Parameters
    ----------
    catalog
        List the short names that can be pulled instead.
    json
        One JSON array for programs.
    """
    rows = _catalog_rows() if catalog else _store_rows()
    if json:
        print(msgspec.json.encode(rows).decode())
    elif catalog:
        print_table(("NAME", "LICENCE", "HERE", "ABOUT"), [_in_words(row) for row in rows])
    elif rows:
        print_table(("NAME", "SIZE", "PULLED", "FROM"), [_stored_in_words(row) for row in rows])
    else:
        print("the store is empty; `tokenmill pull` fetches the default model")
    return 0


def _store_rows() -> list[dict[str, Any]]:
    return [
        {"name": m.name, "size_bytes": m.size_bytes, "pulled_at_s": m.pulled_at_s, "source": m.source}
        for m in Store().manifests()
    ]


def _catalog_rows() -> list[dict[str, Any]]:
    here = set(Store().names())
    return [
        {"name": e.name, "about": e.about, "license": e.license, "repo": e.repo, "file": e.file, "here": e.name in here}
        for e in load_catalog().values()
    ]


def _in_words(row: dict[str, Any]) -> tuple[str, ...]:
    return row["name"], row["license"], "yes" if row["here"] else "", row["about"]


def _stored_in_words(row: dict[str, Any]) -> tuple[str, ...]:
    pulled = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["pulled_at_s"]))
    return row["name"], size(row["size_bytes"]), pulled, row["source"]
