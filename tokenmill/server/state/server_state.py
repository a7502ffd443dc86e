"""The persistent state of one server, and the interface of services that run beside its requests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from tokenmill.config.server import ServerConfig
from tokenmill.observe.log import get_log
from tokenmill.server.state.database import Database
from tokenmill.server.state.instance import ServerInstance
from tokenmill.store.layout import store_root

log = get_log("server")
FILE_NAME = "tokenmill.db"


class Service(Protocol):
    """A service that runs beside the requests, such as background responses."""

    async def start(self) -> None: ...  # called when the models are ready for requests
    async def close(self) -> None: ...  # called after the drain of running requests, before the engines are closed


class ServerState:
    """The database, and the identity of this server in it."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: of the state; None: in memory."""
        self.folder = folder
        self.database = Database(None if folder is None else folder / FILE_NAME)
        self.instance = ServerInstance(None if folder is None else folder / "servers")

    @classmethod
    def of(cls, config: ServerConfig) -> ServerState:
        """Return the configured state. If its folder is not writable, warn and use memory."""
        if not config.state:
            return cls(None)
        folder = config.state_dir or store_root() / "state"
        existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        if os.access(existing, os.W_OK | os.X_OK):
            return cls(folder)
        log.warning("%s is not writable: responses, files and batches are stored in memory only", existing)
        return cls(None)

    async def close(self) -> None:
        await self.database.close()
        self.instance.leave()
