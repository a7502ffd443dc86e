"""Connections that carry activations between pipeline stages: a ring of processes, or of threads.

    rank of stage 0 ──► stage 1 ──► … ──► last stage ──► rank of stage 0

Each rank sends to the rank with the same index in the next stage. A send may block until the receiver reads; the first
stage reads in a separate thread, so that the ring can't deadlock. When a rank ends, its connections close, which ends
the waits of its neighbours.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from tokenmill.errors import PeerDied

GONE = "the rank of another stage has ended"


class StageLink:
    def __init__(self, before: Connection, behind: Connection, *, reads_ahead: bool) -> None:
        """`before`: the connection to read from; `behind`: the one to write to. `reads_ahead`: read in a thread."""
        self._before, self._behind = before, behind
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reads_ahead = reads_ahead
        self.num_bytes = 0  # sent so far
        if reads_ahead:
            threading.Thread(target=self._read, name="stage-results", daemon=True).start()

    def send(self, x: torch.Tensor) -> None:
        """Send a matrix to the next stage."""
        values = x.contiguous().view(-1).view(torch.uint8).numpy()
        try:
            self._behind.send_bytes(f"{str(x.dtype).removeprefix('torch.')} {x.shape[0]} {x.shape[1]}".encode())
            if values.size:
                self._behind.send_bytes(values.data)
        except (OSError, ValueError):
            raise PeerDied(GONE) from None
        self.num_bytes += values.size

    def receive(self) -> torch.Tensor:
        """Wait for the next matrix from the previous stage."""
        found = self._arrived.get() if self._reads_ahead else self._next()
        if found is None:
            raise PeerDied(GONE)
        return self._opened(found)

    def close(self) -> None:
        """Close the connections, which ends the neighbours' waits. A reading thread ends when the previous stage closes
        its side."""
        with suppress(OSError):
            self._behind.close()
        if not self._reads_ahead:
            self._before.close()

    def _read(self) -> None:
        while (found := self._next()) is not None:
            self._arrived.put(found)
        self._arrived.put(None)
        self._before.close()

    def _opened(self, received: Any) -> torch.Tensor:
        """Turn what `_next` read into a matrix."""
        matrix: torch.Tensor = received
        return matrix

    def _next(self) -> Any:
        """Read the next message, possibly in a thread; None if the previous stage has ended."""
        try:
            dtype, rows, columns = self._before.recv_bytes().decode().split()
            shape = int(rows), int(columns)
            values = bytearray(self._before.recv_bytes()) if shape[0] * shape[1] else bytearray()
        except (EOFError, OSError, ValueError):
            return None
        kind: torch.dtype = getattr(torch, dtype)
        return torch.frombuffer(values, dtype=kind).view(shape) if values else torch.empty(shape, dtype=kind)
