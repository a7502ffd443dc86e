"""The models that the page lists: served, stored and catalogued ones, and whether they fit this machine.

The planner decides what fits. The server does not import the planner, so its caller passes it as a `FitFinder`; without
one the page shows only sizes. A plan takes milliseconds, and the first one measures the machine, so plans are made in a
thread, once per model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.server.auth import may_manage
from tokenmill.server.model_admin import FLAG, ROW, model_rows
from tokenmill.server.routing import TEXT, Endpoint, RouteContext, json_response, list_of, object_of
from tokenmill.server.ui.feed import TAG, require_own_page
from tokenmill.store import Manifest, Store, load_catalog

JsonFit = dict[str, Any]


class FitFinder(Protocol):
    """Estimates what models need on this machine: {needs_bytes, is_planned, tokens_s}; None if it is unknown."""

    def device(self) -> tuple[str, int]: ...  # its name, and the bytes that are free for models
    def of_files(self, name: str, path: Path) -> JsonFit | None: ...
    def of_catalog(self, name: str) -> JsonFit | None: ...


MakeFinder = Callable[[], FitFinder]  # called on the first request of the page


class ModelLists:
    """The lists of stored and catalogued models."""

    def __init__(self, make_finder: MakeFinder | None) -> None:
        self._make_finder = make_finder
        self._finder: FitFinder | None = None
        self._available = 0
        self._fits: dict[tuple[str, Path | None], JsonFit | None] = {}

    def listed(self) -> dict[str, Any]:
        """Read the store and plan new models. This may take a second."""
        store = Store()
        manifests = store.manifests()
        paths = {manifest.name: store.path_of(manifest) for manifest in manifests}
        device = ""
        if self._make_finder is not None:
            self._finder = self._finder or self._make_finder()
            device, self._available = self._finder.device()
        return {
            "device": device,
            "available_bytes": self._available,
            "stored": [self._stored(manifest, store) for manifest in manifests],
            "catalog": [
                {
                    "name": entry.name,
                    "about": entry.about,
                    "license": entry.license,
                    "size_bytes": entry.size_bytes,
                    "is_stored": entry.name in paths,
                    "fit": self._fit(entry.name, paths.get(entry.name)),
                }
                for entry in load_catalog().values()
            ],
        }

    def _stored(self, manifest: Manifest, store: Store) -> dict[str, Any]:
        path = store.path_of(manifest)
        entry = load_catalog().get(manifest.name)
        return {
            "name": manifest.name,
            "about": entry.about if entry is not None else "",
            "source": manifest.source,
            "parent": manifest.parent,
            "size_bytes": manifest.size_bytes,
            "fit": self._fit(manifest.name, path),
        }

    def _fit(self, name: str, path: Path | None) -> JsonFit | None:
        finder, key = self._finder, (name, path)
        if finder is None:
            return None
        if key not in self._fits:
            self._fits[key] = finder.of_catalog(name) if path is None else finder.of_files(name, path)
        fit = self._fits[key]
        return None if fit is None else {**fit, "fits": fit["needs_bytes"] <= self._available}


def model_list_endpoints(context: RouteContext, make_finder: MakeFinder | None) -> list[Endpoint]:
    lists = ModelLists(make_finder)
    lock = asyncio.Lock()

    async def models_to_choose_from(request: Request) -> Response:
        require_own_page(request)
        async with lock:
            listed = await asyncio.to_thread(lists.listed)
        can_manage, served = may_manage(request, context.config), await model_rows(context, request)
        return json_response({"can_manage": can_manage, "served": served, **listed})

    row = object_of(name=TEXT, about=TEXT)
    return [
        Endpoint(
            "GET",
            "/ui/models",
            models_to_choose_from,
            TAG,
            object_of(can_manage=FLAG, served=list_of(ROW), stored=list_of(row), catalog=list_of(row)),
            (403,),
            description="The served, stored and catalogued models, and whether they fit this machine.",
        )
    ]
