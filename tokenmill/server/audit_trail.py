"""The audit entries of a running server: start and stop, refused keys, changed keys, loads, unloads and restarts.

Entries are collected on the event loop and written by a thread, at most twice a second, so that no request waits for
the disk. Restarts of engines are found by polling their counters twice a second, so the engine need not know of the
audit log. Refused keys are counted in between, so that a flood of them does not fill the disk.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import tokenmill
from tokenmill.config.server import ServerConfig
from tokenmill.errors import TokenmillError
from tokenmill.observe.log import get_log
from tokenmill.server.audit import FILE_NAME, Detail, Entry, append, file_beside, newest
from tokenmill.server.gate import EngineGate
from tokenmill.server.keys import KeyRecord, KeyRing
from tokenmill.server.registry import ModelRegistry
from tokenmill.server.write_behind import WriteBehind

log = get_log("server")

MAX_CLIENTS = 20  # clients with an entry of their own per interval; the others are counted together
MAX_NAMES = 100  # key ids listed in one entry
MAX_TEXT = 200  # characters

Records = Mapping[str, KeyRecord]


def audit_file(config: ServerConfig, keys: KeyRing, state_folder: Path | None) -> Path | None:
    """Return the path of a server's audit log: the configured one, else (if the server has keys and a state folder)
    beside the keys file or in the state folder."""
    if config.audit_log is not None or not keys or state_folder is None:
        return config.audit_log
    if keys.path is not None and os.access(keys.path.parent, os.W_OK | os.X_OK):
        return file_beside(keys.path)
    return state_folder / FILE_NAME


class AuditTrail:
    """Collects entries and writes them; without a path it does nothing."""

    def __init__(self, path: Path | None, registry: ModelRegistry, keys: KeyRing) -> None:
        self._path = path
        self._registry = registry
        self._keys = keys
        self._known: Records = keys.records()
        self._entries: WriteBehind[Entry] = WriteBehind("entries of the audit log", self._append)
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._restarts: dict[str, int] = {}
        self._given_up: set[str] = set()
        self._watching: asyncio.Task[None] | None = None
        self.note("server_started", version=tokenmill.__version__, num_keys=len(keys))

    def note(self, event: str, **details: Detail) -> None:
        if self._path is not None:
            self._entries.add((time.time(), event, details))

    def note_refusal(self, client: str, reason: str) -> None:
        """Count a request whose key was refused."""
        if self._path is not None:
            is_known = (client, reason) in self._refusals
            who = client if is_known or len(self._refusals) < MAX_CLIENTS else "others"
            self._refusals[(who, reason)] += 1

    def note_keys(self) -> None:
        """Add an entry with the keys that were added, removed or changed, after they were read again."""
        now, before = self._keys.records(), self._known
        self._known = now
        added, removed = sorted(now.keys() - before.keys()), sorted(before.keys() - now.keys())
        changed = sorted(name for name in now.keys() & before.keys() if now[name] != before[name])
        self.note(
            "keys_reloaded",
            num_keys=len(now),
            added=added[:MAX_NAMES],
            removed=removed[:MAX_NAMES],
            changed=changed[:MAX_NAMES],
        )

    def note_load(self, gate: EngineGate, seconds: float) -> None:
        self.note("model_loaded", model=gate.label, seconds=round(seconds, 3))

    def note_failed_load(self, gate: EngineGate, problem: TokenmillError) -> None:
        self.note("model_load_failed", model=gate.label, error=problem.code)

    def note_unload(self, model: str) -> None:
        self._restarts.pop(model, None)
        self.note("model_unloaded", model=model)

    # ── as a service ───────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Write the entries so far, and from now on write new ones periodically."""
        if self._path is None:
            return
        await self._entries.flush()
        await self._log_newest_hash()
        self._watching = asyncio.create_task(self._entries.run(before=self._poll))

    async def close(self) -> None:
        if self._path is None:
            return
        if self._watching is not None:
            self._watching.cancel()
        self._poll()
        self.note("server_stopped")
        await self._entries.flush()
        await self._log_newest_hash()

    def _append(self, entries: list[Entry]) -> None:
        assert self._path is not None
        append(self._path, entries)

    def _poll(self) -> None:
        refusals, self._refusals = self._refusals, Counter()
        for (client, reason), count in refusals.items():
            self.note("auth_failed", client=client[:MAX_TEXT], reason=reason, count=count)
        for gate in self._registry.gates:
            self._poll_gate(gate)

    def _poll_gate(self, gate: EngineGate) -> None:
        stats, name = gate.stats(), gate.label
        if stats is None:
            return
        known = self._restarts.get(name, 0)
        if stats.restarts > known:
            self.note("engine_restarted", model=name, times=stats.restarts - known)
        self._restarts[name] = stats.restarts
        if gate.health().is_given_up and name not in self._given_up:
            self._given_up.add(name)
            self.note("engine_given_up", model=name)

    async def _log_newest_hash(self) -> None:
        """Write the newest hash to the server's log: an audit log that is truncated later does not contain it."""
        assert self._path is not None
        try:
            number, newest_hash = await asyncio.to_thread(newest, self._path)
        except (OSError, TokenmillError) as problem:
            log.error("the audit log can't be read: %s", problem)
        else:
            log.info("audit log: %d entries, the hash of the newest is %s", number, newest_hash)
