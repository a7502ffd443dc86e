"""The state of one server, as its routes have it at hand, and the work that goes on without a client waiting for it."""

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
    """Work of a server that no request waits for, such as background responses."""

    async def start(self) -> None: ...  # the models take requests now
    async def close(self) -> None: ...  # running requests have ended, or their time is over; engines close next


class ServerState:
    """The database and this server's name in it."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: where the state is kept; None: in memory."""
        self.folder = folder
        self.database = Database(None if folder is None else folder / FILE_NAME)
        self.instance = ServerInstance(None if folder is None else folder / "servers")

    @classmethod
    def of(cls, config: ServerConfig) -> ServerState:
        """The state that the settings ask for; where nothing can be written, it is in memory, and the log says so."""
        if not config.state:
            return cls(None)
        folder = config.state_dir or store_root() / "state"
        place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        if os.access(place, os.W_OK | os.X_OK):
            return cls(folder)
        log.warning("%s can't be written: responses, files and batches are kept in memory only", place)
        return cls(None)

    async def close(self) -> None:
        await self.database.close()
        self.instance.leave()
