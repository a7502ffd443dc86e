"""Permanent rows on the device: what a decoding step must know of its rows is looked up there, not sent.

`tables` int32 [groups, max_rows, max_blocks] and `newest` int64 [max_rows] (each row's last drawn token) stay on the
device. A step says which rows it is about; a row of number NO_ROW only fills up the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from tokenmill.ops.triton.kernel import kernel, kernel_for_any
from tokenmill.ops.triton.overlap import launch_options, wait_for_previous

NO_ROW = -1


@dataclass(frozen=True)
class Found:
    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R]
    contexts: torch.Tensor  # int32 [R], 0 where there is no row
    slots: torch.Tensor  # int64 [groups, R], in the null block where there is no row
    tables: torch.Tensor  # int32 [groups, R, max_blocks], filled as far as the context reaches


@kernel_for_any("num_rows")
def _look_up(
    given, tables, newest, token_ids, positions, contexts, slots, step_tables, num_rows, max_rows, max_blocks,
    NUM_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """given [3, R]: row, position, token (-1: the newest one of the row)"""
    line = tl.program_id(0)
    row = tl.load(given + line)
    position = tl.load(given + num_rows + line)
    token = tl.load(given + 2 * num_rows + line)
    is_row = row >= 0
    seat = tl.maximum(row, 0).to(tl.int64)
    token = tl.where(token >= 0, token.to(tl.int64), tl.load(newest + seat))
    tl.store(token_ids + line, tl.where(is_row, tl.maximum(token, 0), 0))
    tl.store(positions + line, position.to(tl.int64))
    tl.store(contexts + line, tl.where(is_row, position + 1, 0))
    for group in range(NUM_GROUPS):
        source = tables + (group * max_rows + seat) * max_blocks
        block = tl.load(source + position // BLOCK_SIZE).to(tl.int64)
        slot = tl.where(is_row, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
        tl.store(slots + group * num_rows + line, slot)
        target = step_tables + (group * num_rows + line).to(tl.int64) * max_blocks
        held = tl.where(is_row, position // BLOCK_SIZE + 1, 0)
        for start in range(0, held, CHUNK):
            entries = start + tl.arange(0, CHUNK)
            inside = entries < held
            tl.store(target + entries, tl.load(source + entries, mask=inside, other=0), mask=inside)


@kernel_for_any("row", "position", "token", "index")
def _give(given, row, position, token, index) -> None:
    tl.store(given, row)
    tl.store(given + 1, position)
    tl.store(given + 2, token)
    tl.store(given + 3, index)


@kernel
def _remember(given, drawn, newest, OVERLAPS: tl.constexpr) -> None:
    wait_for_previous(OVERLAPS)
    line = tl.program_id(0)
    row = tl.load(given + line)
    tl.store(newest + row, tl.load(drawn + line), mask=row >= 0)


def look_up(given: torch.Tensor, tables: torch.Tensor, newest: torch.Tensor, block_size: int) -> Found:
    """given int32 [3, R]: row, position, token (negative: the row's newest)"""
    size, device = given.shape[1], given.device
    groups, max_rows, max_blocks = tables.shape
    found = Found(
        token_ids=torch.empty(size, dtype=torch.int64, device=device),
        positions=torch.empty(size, dtype=torch.int64, device=device),
        contexts=torch.empty(size, dtype=torch.int32, device=device),
        slots=torch.empty(groups, size, dtype=torch.int64, device=device),
        tables=torch.empty(groups, size, max_blocks, dtype=torch.int32, device=device),
    )
    _look_up[(size,)](
        given, tables, newest, found.token_ids, found.positions, found.contexts, found.slots, found.tables,
        size, max_rows, max_blocks, groups, block_size, 256,
    )  # fmt: skip
    return found


def give(given: torch.Tensor, row: int, position: int, token: int, index: int) -> None:
    """The same as a copy into given int32 [4, 1], which would take longer to begin than a kernel does"""
    _give[(1,)](given, row, position, token, index, num_warps=1)


def remember(given: torch.Tensor, drawn: torch.Tensor, newest: torch.Tensor) -> None:
    """drawn [R] becomes the newest token of each row."""
    _remember[(drawn.shape[0],)](given, drawn, newest, num_warps=1, **launch_options())
