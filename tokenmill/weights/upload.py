"""Copies from a mapped file to a GPU, in chunks through page-locked memory with two buffers per thread.

So reading the file's pages, copying them and the bus transfer overlap, and several threads can read concurrently. All
copies are on the caller's stream, so later work on that stream sees the complete tensor.
"""

from __future__ import annotations

import threading

import torch

PIECE_BYTES = 16 << 20


class _Pieces(threading.local):
    """A thread's two page-locked buffers; one is filled while the other is copied."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.sent: list[torch.cuda.Event] = []

    def next(self, number: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        if not self.buffers:
            self.buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self.sent = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]  # torch's
        event = self.sent[number % 2]
        event.synchronize()  # returns immediately if it was never recorded
        return self.buffers[number % 2], event


_pieces = _Pieces()


def to_gpu(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a CPU tensor on the device."""
    if values.device.type != "cpu" or values.nbytes < PIECE_BYTES:
        return values.to(device)
    out = torch.empty(values.shape, dtype=values.dtype, device=device)
    source, target = (tensor.reshape(-1).view(torch.uint8) for tensor in (values, out))
    for number, start in enumerate(range(0, len(source), PIECE_BYTES)):
        buffer, event = _pieces.next(number)
        piece = source[start : start + PIECE_BYTES]
        buffer[: len(piece)].copy_(piece)
        target[start : start + len(piece)].copy_(buffer[: len(piece)], non_blocking=True)
        event.record()
    return out
