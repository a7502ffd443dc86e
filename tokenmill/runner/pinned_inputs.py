"""The host's memory that kernels read and write by themselves, without copies.

Torch knows of its own copies only, so nothing tells it when a kernel is done with pinned memory. Whatever is shared
here lies in a ring of places, each with an event behind its last use: it is written again when that has passed, which
with so many places it always has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.ops.triton.batch.decode_inputs import (
    INDEX,
    NO_ROW,
    NUM_WORDS,
    POSITION,
    RING_SIZE,
    ROW,
    TOKEN,
    UNIFORM,
    StepMailbox,
    change_tables,
)

PADDING_ROW = (NO_ROW, 0, -1, 0, 0, 0, 0, 0)  # a line that only fills up
FEW_CHANGES = 512


def shared(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the host that kernels on `device` can reach"""
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def new_mailbox(max_rows: int, device: torch.device) -> StepMailbox:
    """In every place a step of nobody"""
    sent = shared(RING_SIZE, max_rows, NUM_WORDS.value, dtype=torch.int32, device=device)
    sent.numpy()[:] = PADDING_ROW
    drawn = shared(RING_SIZE, max_rows, dtype=torch.int64, device=device)
    return StepMailbox(sent, drawn, torch.zeros(1, dtype=torch.int32, device=device))


class RingSlots:
    """Which place of a ring comes next; who is done with the last one"""

    def __init__(self) -> None:
        self.next = 0
        self._done: list[torch.cuda.Event | None] = [None] * RING_SIZE

    def take(self) -> int:
        """The next place, which nobody reads or writes any more"""
        done = self._done[self.next]
        if done is not None:
            done.synchronize()
        return self.next

    def used(self) -> torch.cuda.Event:
        """What uses the place taken is on the stream; the event passes when it is done."""
        done = self._done[self.next] or torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        self._done[self.next] = done
        self.next = (self.next + 1) % RING_SIZE
        return done


class PinnedStepInputs:
    """The host's side of an exchange: what steps are told, and where their tokens arrive"""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.mailbox = new_mailbox(max_rows, device)
        self._words: NDArray[np.int32] = self.mailbox.sent.numpy()
        self._uniforms: NDArray[np.float64] = self._words.view(np.float64)
        self._turns = RingSlots()
        self._is_written = False  # and not yet launched

    def write(
        self,
        size: int,
        rows: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
        indices: Sequence[int],
        uniforms: Sequence[float] | None,
    ) -> torch.Tensor:
        """For a step of `size` lines, to be launched next. → where its tokens will be, int64 [size]"""
        if self._is_written:  # somebody was interrupted, before or after the launch: the device knows
            self._turns.next = int(self.mailbox.turn)
        self._is_written = True
        place, count = self._turns.take(), len(rows)
        words = self._words[place]
        words[count:size] = PADDING_ROW
        words[:count, ROW], words[:count, POSITION], words[:count, INDEX] = rows, positions, indices
        words[:count, TOKEN] = tokens
        if uniforms is not None:
            self._uniforms[place, :count, UNIFORM // 2] = uniforms
        return self.mailbox.drawn[place, :size]

    def launched(self) -> torch.cuda.Event:
        done = self._turns.used()
        self._is_written = False
        return done


class RowTables:
    """Block tables of all rows on the device, int32 [groups, max_rows, max_blocks]"""

    def __init__(self, num_groups: int, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.tables = torch.zeros(num_groups, max_rows, max_blocks, dtype=torch.int32, device=device)
        self._turns = RingSlots()
        self._places = [shared(0, dtype=torch.int64, device=device)] * RING_SIZE

    def change(self, changes: Sequence[tuple[int, int, int, list[int]]]) -> None:
        """(group, row, first entry, its blocks and those of the next entries) each"""
        if not changes:
            return
        _, max_rows, max_blocks = self.tables.shape
        counts = [len(blocks) for *_, blocks in changes]
        firsts = [(group * max_rows + row) * max_blocks + start for group, row, start, _ in changes]
        total = sum(counts)
        packed = self._room(total)
        lines = packed.numpy()
        offsets = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        lines[0] = np.repeat(firsts, counts) + offsets
        lines[1] = np.concatenate([blocks for *_, blocks in changes]) if len(changes) > 1 else changes[0][3]
        change_tables(packed, self.tables)
        self._turns.used()

    def _room(self, num_changes: int) -> torch.Tensor:
        """int64 [2, num_changes] in the place that is next"""
        place = self._turns.take()
        if self._places[place].numel() < 2 * num_changes:
            size = 2 * max(num_changes, FEW_CHANGES)
            self._places[place] = shared(size, dtype=torch.int64, device=self.tables.device)
        return self._places[place][: 2 * num_changes].view(2, num_changes)
