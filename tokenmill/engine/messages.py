"""Messages between a front and its core: tagged msgspec structs, sent through a queue or a socket."""

from __future__ import annotations

import msgspec

from tokenmill.config import EngineConfig
from tokenmill.engine.status import CoreInfo, EngineStats, FailedAdapter, LoadedAdapter
from tokenmill.types import KVCacheEvents, Request, SequenceOutput


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message to a core process: the model to load."""

    config: EngineConfig
    model_path: str


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request, or only one of its sequences (whose stop string was found)."""

    request_id: str
    index: int | None = None


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter; the core replies with `AdapterRead`."""

    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    name: str


class WatchBlocks(msgspec.Struct, frozen=True, tag=True):
    """Report the blocks in the prefix cache with the outputs from now on: first all of them, then changes."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: CoreInfo


class Outputs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    outputs: list[SequenceOutput]
    stats: EngineStats
    cache_events: KVCacheEvents | None = None


class AdapterRead(msgspec.Struct, frozen=True, tag=True):
    """The result of a `LoadAdapter`."""

    loaded: LoadedAdapter | None
    failed: FailedAdapter | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The core stopped with an error, or could not start."""

    message: str
    hint: str | None = None
    exit_code: int = 1


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The core's heartbeat (`heartbeat.py`)."""


ToCore = Start | Submit | Abort | LoadAdapter | UnloadAdapter | WatchBlocks | Shutdown
FromCore = Ready | Outputs | AdapterRead | Failed | Beat
