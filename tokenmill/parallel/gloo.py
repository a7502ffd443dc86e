"""Ranks as processes of one host that exchange over loopback TCP, with torch's gloo.

gloo gathers parts of equal size, so narrower parts are padded to the widest. When a peer dies, its connections close
and all waits end immediately; a peer that hangs is detected by gloo's timeout.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

from tokenmill.errors import PeerDied
from tokenmill.parallel.group import BaseGroup

WAIT_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 60.0
LOOPBACK = "127.0.0.1"  # nothing listens beyond this host


class GlooGroup(BaseGroup):
    def __init__(self, rank: int, size: int, store: Path) -> None:
        """`store`: a new file, the same for all ranks, through which they connect at the first collective."""
        self.rank = rank
        self._size = size
        self._store = store
        self._group: Any = None
        self.is_aborted = False

    @property
    def size(self) -> int:
        return self._size

    def _connected(self) -> Any:
        c10d: Any = distributed  # torch's type annotations lack options and stores
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = datetime.timedelta(seconds=WAIT_TIMEOUT_S)
        store = c10d.FileStore(str(self._store), self.size)
        store.set_timeout(datetime.timedelta(seconds=CONNECT_TIMEOUT_S))
        return c10d.ProcessGroupGloo(store, self.rank, self.size, options)

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        widest = max(widths)
        own = functional.pad(x, (0, widest - x.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        if self.is_aborted:
            raise PeerDied("another rank has ended")
        try:
            self._group = self._group or self._connected()
            self._group.allgather([parts], [own]).wait()
        except RuntimeError as error:
            raise PeerDied(f"another rank has ended, or does not answer: {str(error)[:200]}") from None
        return [part[..., :width] for part, width in zip(parts, widths, strict=True)]

    def abort(self) -> None:
        """Make later collectives fail; a collective that is waiting ends when the peer's connections close."""
        self.is_aborted = True

    def close(self) -> None:
        self._group = None
