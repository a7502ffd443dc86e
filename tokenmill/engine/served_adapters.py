"""The adapters that requests may name, kept the same on all cores of a model across restarts.

The front keeps the list of adapters (`_adapters`); each core loads them itself. A restarted core has only the adapters
of the config, so later loads and unloads are sent to it again. A name can be used while at least one core has loaded
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.config.adapters import require_adapter_name
from tokenmill.engine.messages import AdapterRead, LoadAdapter, UnloadAdapter
from tokenmill.engine.replica import Replica
from tokenmill.engine.status import CoreInfo, FailedAdapter, LoadedAdapter
from tokenmill.errors import InvalidRequest, TokenmillError, UnknownModel, error_with_code


@dataclass(eq=False)
class AdapterLoading:
    """An adapter that a client has requested and that some cores have not loaded yet."""

    path: Path
    done: asyncio.Future[LoadedAdapter]
    missing: set[Replica]


class ServedAdapters:
    def __init__(self, replicas: Sequence[Replica], on_change: Callable[[list[LoadedAdapter]], None]) -> None:
        """`on_change` is called with the usable adapters whenever they change."""
        self._replicas = replicas
        self._on_change = on_change
        self._adapters: dict[str, LoadedAdapter] | None = None  # None: no core has started yet
        self._loading: dict[str, AdapterLoading] = {}

    def usable(self) -> list[LoadedAdapter]:
        """Return the adapters that at least one running core has; all of the list if every core is stopped."""
        adapters = (self._adapters or {}).values()
        if all(replica.is_stopped for replica in self._replicas):
            return list(adapters)
        return [one for one in adapters if any(r.adapters.get(one.name) == one.digest for r in self._replicas)]

    async def load(self, name: str, path: Path) -> LoadedAdapter:
        """Load an adapter; for later requests it replaces one of the same name."""
        require_adapter_name(name)
        if (loading := self._loading.get(name)) is not None:
            if loading.path != path:
                raise InvalidRequest(f"another adapter {name!r} is being loaded", param="lora_name")
            return await asyncio.shield(loading.done)
        ready = {replica for replica in self._replicas if replica.is_ready}
        loading = AdapterLoading(path, asyncio.get_running_loop().create_future(), ready)
        self._loading[name] = loading
        for replica in ready:
            self._send_load(replica, name, str(path))
        return await asyncio.shield(loading.done)

    def unload(self, name: str) -> None:
        """Remove an adapter's name; running requests keep using the adapter."""
        if name not in {one.name for one in self.usable()}:
            raise UnknownModel(f"the adapter {name[:200]!r} is not loaded", param="lora_name")
        assert self._adapters is not None
        del self._adapters[name]
        for replica in self._replicas:
            self._withdraw(replica, name)
        self._changed()

    def may_come(self, digest: str) -> bool:
        """Tell whether a core has an adapter, or may yet load it."""
        names = {one.name for one in (self._adapters or {}).values() if one.digest == digest}
        return any(
            digest in one.adapters.values()
            or bool(names & one.coming_adapters)
            or (bool(names) and not one.is_ready and not one.supervisor.is_given_up)
            for one in self._replicas
        )

    # ── events of the cores ────────────────────────────────────────────────────────────────────────────

    def note_ready(self, replica: Replica, info: CoreInfo) -> None:
        """Send a newly started core, which has the config's adapters, the changes since then."""
        if self._adapters is None:
            self._adapters = {one.name: one for one in info.adapters}
        for adapter in info.adapters:
            known = self._adapters.get(adapter.name)
            if known is not None and known.path == adapter.path:
                replica.adapters[adapter.name] = adapter.digest
                self._adapters[adapter.name] = adapter
            else:
                replica.send(UnloadAdapter(adapter.name))
        for adapter in self._adapters.values():
            if adapter.name not in replica.adapters:
                self._send_load(replica, adapter.name, adapter.path)
        for name, loading in self._loading.items():
            loading.missing.add(replica)
            self._send_load(replica, name, str(loading.path))
        self._changed()

    def note_read(self, replica: Replica, message: AdapterRead) -> None:
        if (loaded := message.loaded) is not None:
            replica.coming_adapters.discard(loaded.name)
            self._note_loaded(replica, loaded)
        elif (failed := message.failed) is not None:
            replica.coming_adapters.discard(failed.name)
            self._note_failed(failed)
        self._changed()

    def _note_loaded(self, replica: Replica, loaded: LoadedAdapter) -> None:
        assert self._adapters is not None
        replica.adapters[loaded.name] = loaded.digest
        loading = self._loading.get(loaded.name)
        if loading is not None:
            loading.missing.discard(replica)
            if not loading.missing:
                self._adapters[loaded.name] = loaded
                self._settle(loaded.name, loaded)
        elif loaded.name in self._adapters:
            self._adapters[loaded.name] = loaded
        else:  # unloaded while it was being read
            self._withdraw(replica, loaded.name)

    def _note_failed(self, failed: FailedAdapter) -> None:
        if failed.name not in self._loading:
            return
        self._settle(failed.name, error_with_code(failed.code, failed.message))
        before = (self._adapters or {}).get(failed.name)
        for replica in self._replicas:  # some may have loaded it, or may be about to
            if before is None:
                self._withdraw(replica, failed.name)
            elif replica.adapters.get(failed.name) != before.digest:
                self._send_load(replica, before.name, before.path)

    def note_death(self, replica: Replica, error: TokenmillError) -> None:
        for name, loading in list(self._loading.items()):
            if replica in loading.missing:
                self._settle(name, error)
        self._changed(without=replica)

    def _send_load(self, replica: Replica, name: str, path: str) -> None:
        replica.coming_adapters.add(name)
        replica.send(LoadAdapter(name, path))

    def _withdraw(self, replica: Replica, name: str) -> None:
        replica.adapters.pop(name, None)
        replica.send(UnloadAdapter(name))

    def _settle(self, name: str, result: LoadedAdapter | TokenmillError) -> None:
        done = self._loading.pop(name).done
        if done.done():
            return
        if isinstance(result, LoadedAdapter):
            done.set_result(result)
        else:
            done.set_exception(result)

    def _changed(self, without: Replica | None = None) -> None:
        if without is not None:
            without.adapters = {}
        self._on_change(self.usable())
