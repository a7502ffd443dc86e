"""Messages between a front and its core: tagged msgspec structs, the same over a queue and over a socket."""

from __future__ import annotations

import msgspec

from tokenmill.config import EngineConfig
from tokenmill.engine.status import CoreInfo, EngineStats, FailedAdapter, LoadedAdapter
from tokenmill.types import KVNews, Request, SequenceOutput


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message to a core process: load this model."""

    config: EngineConfig
    model_path: str


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget a request, or only one of its sequences (its stop string was found)."""

    request_id: str
    index: int | None = None


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter; `AdapterRead` answers."""

    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    name: str


class WatchBlocks(msgspec.Struct, frozen=True, tag=True):
    """Tell from now on, beside the outputs, which blocks are in the prefix cache; begin with all of them."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: CoreInfo


class Outputs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    outputs: list[SequenceOutput]
    stats: EngineStats
    news: KVNews | None = None


class AdapterRead(msgspec.Struct, frozen=True, tag=True):
    """The result of a `LoadAdapter`."""

    loaded: LoadedAdapter | None
    failed: FailedAdapter | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The core cannot go on (or could not start)."""

    message: str
    hint: str | None = None
    exit_code: int = 1


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life of the core (`heartbeat.py`)."""


ToCore = Start | Submit | Abort | LoadAdapter | UnloadAdapter | WatchBlocks | Shutdown
FromCore = Ready | Outputs | AdapterRead | Failed | Beat
