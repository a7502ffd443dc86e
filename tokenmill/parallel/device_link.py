"""Connections between pipeline stages with GPUs: the receiver maps memory of the sender's GPU (`device_memory.py`).

Activations are read from that memory; only messages that say where they are go over the pipe.

    sender     stream ─► next of its slots ─► event             receiver   message ─► its stream waits for the event
               └── message: slot, shape; the first one also has the IPC handles of the memory and the events

A message is sent after all kernels before the event are launched, so no kernel spins on the device while another is
still to be loaded. The receiver's host continues immediately; its kernels wait for the event on the device. A slot is
reused after `num_slots` streams: fewer steps than that are in flight, so its reader is done by then.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from tokenmill.errors import PeerDied
from tokenmill.parallel.device_memory import MappedMemory, SharedMemory
from tokenmill.parallel.stage_link import GONE, StageLink

ALIGNMENT = 256  # of a slot's first byte


class SentSlots(msgspec.Struct, frozen=True, array_like=True):
    """The IPC handles by which another process maps a sender's slots and events."""

    handle: bytes
    slot_bytes: int
    events: list[bytes]


class SentStream(msgspec.Struct, frozen=True, array_like=True):
    slot: int
    shape: tuple[int, int]
    dtype: str
    slots: SentSlots | None  # in the first message only


class DeviceBytes:
    """Wraps device memory for `torch.as_tensor`, without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SentStream)


class DeviceStageLink(StageLink):
    def __init__(
        self, before: Connection, behind: Connection, *, reads_ahead: bool, slot_bytes: int, num_slots: int
    ) -> None:
        """`slot_bytes`: size of the largest stream; `num_slots`: at least as many as streams are in flight."""
        self._slot_bytes = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
        self._num_slots = num_slots
        self._num_sent = 0
        self._own: SharedMemory | None = None
        self._theirs: MappedMemory | None = None
        self._sent_events: list[torch.cuda.Event] = []
        self._their_events: list[torch.cuda.Event] = []
        self._own_slots = self._their_slots = torch.empty(0, 0, dtype=torch.uint8)
        super().__init__(before, behind, reads_ahead=reads_ahead)

    def send(self, x: torch.Tensor) -> None:
        slots = self._open_own() if self._own is None else None
        slot, self._num_sent = self._num_sent % self._num_slots, self._num_sent + 1
        values = x.contiguous().view(-1).view(torch.uint8)
        assert len(values) <= self._slot_bytes, "a stream is larger than planned"
        self._own_slots[slot, : len(values)].copy_(values, non_blocking=True)
        self._sent_events[slot].record()
        shape = (x.shape[0], x.shape[1])
        message = SentStream(slot, shape, str(x.dtype).removeprefix("torch."), slots)
        try:
            self._behind.send_bytes(_encoder.encode(message))
        except (OSError, ValueError):
            raise PeerDied(GONE) from None
        self.num_bytes += len(values)

    def _open_own(self) -> SentSlots:
        torch.cuda.synchronize()  # also makes the CUDA context current in this thread, for the driver API calls below
        self._own = SharedMemory(self._slot_bytes * self._num_slots)
        self._own_slots = self._bytes_at(self._own.address, self._slot_bytes)
        made = [torch.cuda.Event(interprocess=True) for _ in range(self._num_slots)]  # type: ignore[no-untyped-call]
        self._sent_events = made
        return SentSlots(self._own.handle(), self._slot_bytes, [bytes(event.ipc_handle()) for event in made])  # type: ignore[no-untyped-call]

    def _bytes_at(self, address: int, slot_bytes: int) -> torch.Tensor:
        whole = torch.as_tensor(DeviceBytes(address, slot_bytes * self._num_slots), device="cuda")
        return whole.view(self._num_slots, slot_bytes)

    def _next(self) -> Any:
        try:
            return _decoder.decode(self._before.recv_bytes())
        except (EOFError, OSError):
            return None

    def _opened(self, received: Any) -> torch.Tensor:
        """Return a view of the sender's memory; the current CUDA stream waits for the sender's event."""
        message: SentStream = received
        if message.slots is not None:
            self._map(message.slots)
        torch.cuda.current_stream().wait_event(self._their_events[message.slot])
        dtype: torch.dtype = getattr(torch, message.dtype)
        rows, columns = message.shape
        values = self._their_slots[message.slot, : rows * columns * dtype.itemsize]
        return values.view(dtype).view(rows, columns)

    def _map(self, slots: SentSlots) -> None:
        torch.cuda.synchronize()
        self._theirs = MappedMemory(slots.handle)
        self._their_slots = self._bytes_at(self._theirs.address, slots.slot_bytes)
        device = torch.device("cuda", torch.cuda.current_device())
        opened: Callable[..., torch.cuda.Event] = torch.cuda.Event.from_ipc_handle
        self._their_events = [opened(device, handle) for handle in slots.events]
