"""Inputs of decode steps, gathered on the device from permanent rows instead of being sent by the host.

`tables` int32 [groups, max_rows, max_blocks] and `newest` int64 [max_rows] (each row's last sampled token) stay on the
device. A step names the rows that it computes; rows numbered NO_ROW pad the batch.

Kernels read the host's inputs from, and write sampled tokens to, pinned host memory: copies before and after a graph
would take 10 us each, mostly launch latency. Both are rings of RING_SIZE slots, since the host is a step or two ahead.
The device counts which slot belongs to a step, so a captured graph needs no arguments:

    host     writes slot k, launches; writes slot k + 1, launches ...           reads slot k of `drawn`
    device   gather_inputs: reads slot k ─► model ─► publish_tokens: writes slot k, counts k + 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.launch.kernel import cdiv, kernel, kernel_unspecialized
from tokenmill.ops.triton.launch.pdl import launch_options, wait_for_previous

NO_ROW = -1
RING_SIZE = 16  # twice the launches that can be in flight: four graphs in each of two steps
ROW, POSITION, TOKEN, INDEX, UNIFORM = range(5)  # int32 words of a row; the last is a float64
NUM_WORDS = tl.constexpr(8)  # 32 bytes: one transaction on the bus
CHANGES = 256  # table changes per program


class StepMailbox(NamedTuple):
    """Buffers for the exchange between host and device; on a GPU the first two are pinned. For each row the host sends
    row, position, token (-1: the row's newest), output index and random number."""

    sent: torch.Tensor  # int32 [RING_SIZE, max_rows, NUM_WORDS]
    drawn: torch.Tensor  # int64 [RING_SIZE, max_rows]
    turn: torch.Tensor  # int32 [1], on the device: the slot of the next step


@dataclass(frozen=True)
class GatheredInputs:
    rows: torch.Tensor  # int32 [R]
    indices: torch.Tensor  # int32 [R]: how many output tokens each row has
    uniforms: torch.Tensor  # float64 [R]
    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R]
    contexts: torch.Tensor  # int32 [R], 0 for padding rows
    slots: torch.Tensor  # int64 [groups, R], in the null block for padding rows
    tables: torch.Tensor  # int32 [groups, R, max_blocks], filled up to the length of the context
    slot: torch.Tensor  # int32 [1]


@triton.jit
def _word(words, number: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, NUM_WORDS) == number, words, 0), axis=0)


@kernel_unspecialized("num_rows")
def _gather_inputs(
    sent, turn, tables, newest, rows, indices, uniforms, token_ids, positions, contexts, slots, step_tables, own_slot,
    num_rows, max_rows, max_blocks, NUM_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    number = tl.program_id(0)
    slot = tl.load(turn)
    # Volatile, because the host writes to this memory.
    words = tl.load(sent + (slot * max_rows + number) * NUM_WORDS + tl.arange(0, NUM_WORDS), volatile=True)
    row, position, token = _word(words, 0), _word(words, 1), _word(words, 2)
    is_row = row >= 0
    row_index = tl.maximum(row, 0).to(tl.int64)
    token = tl.where(token >= 0, token.to(tl.int64), tl.load(newest + row_index))
    bits = (_word(words, 5).to(tl.int64) << 32) | (_word(words, 4).to(tl.int64) & 0xFFFFFFFF)
    tl.store(own_slot, slot)
    tl.store(rows + number, row)
    tl.store(indices + number, _word(words, 3))
    tl.store(uniforms + number, bits.to(tl.float64, bitcast=True))
    tl.store(token_ids + number, tl.where(is_row, tl.maximum(token, 0), 0))
    tl.store(positions + number, position.to(tl.int64))
    tl.store(contexts + number, tl.where(is_row, position + 1, 0))
    for group in range(NUM_GROUPS):
        source = tables + (group * max_rows + row_index) * max_blocks
        block = tl.load(source + position // BLOCK_SIZE).to(tl.int64)
        kv_slot = tl.where(is_row, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
        tl.store(slots + group * num_rows + number, kv_slot)
        target = step_tables + (group * num_rows + number).to(tl.int64) * max_blocks
        held = tl.where(is_row, position // BLOCK_SIZE + 1, 0)
        for start in range(0, held, CHUNK):
            entries = start + tl.arange(0, CHUNK)
            inside = entries < held
            tl.store(target + entries, tl.load(source + entries, mask=inside, other=0), mask=inside)


@kernel
def _publish_tokens(
    rows, drawn, slot, newest, arrived, turn, max_rows, HAS_DRAWN: tl.constexpr, RING_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_previous(OVERLAPS)
    number = tl.program_id(0)
    own = tl.load(slot)
    if HAS_DRAWN:
        row, token = tl.load(rows + number), tl.load(drawn + number)
        tl.store(newest + row, token, mask=row >= 0)
        tl.store(arrived + own * max_rows + number, token)
    if number == 0:
        tl.store(turn, (own + 1) % RING_SIZE)


@kernel_unspecialized("num_changes")
def _change(changes, tables, num_changes, CHANGES: tl.constexpr) -> None:
    at = tl.program_id(0) * CHANGES + tl.arange(0, CHANGES)
    inside = at < num_changes
    entries = tl.load(changes + at, mask=inside, other=0, volatile=True)
    blocks = tl.load(changes + num_changes + at, mask=inside, other=0, volatile=True)
    tl.store(tables + entries, blocks.to(tl.int32), mask=inside)


def gather_inputs(
    size: int, exchange: StepMailbox, tables: torch.Tensor, newest: torch.Tensor, block_size: int
) -> GatheredInputs:
    """Gather the inputs of the ring's next step, which has `size` rows."""
    device = tables.device
    groups, max_rows, max_blocks = tables.shape
    found = GatheredInputs(
        rows=torch.empty(size, dtype=torch.int32, device=device),
        indices=torch.empty(size, dtype=torch.int32, device=device),
        uniforms=torch.empty(size, dtype=torch.float64, device=device),
        token_ids=torch.empty(size, dtype=torch.int64, device=device),
        positions=torch.empty(size, dtype=torch.int64, device=device),
        contexts=torch.empty(size, dtype=torch.int32, device=device),
        slots=torch.empty(groups, size, dtype=torch.int64, device=device),
        tables=torch.empty(groups, size, max_blocks, dtype=torch.int32, device=device),
        slot=torch.empty(1, dtype=torch.int32, device=device),
    )
    _gather_inputs[(size,)](
        exchange.sent, exchange.turn, tables, newest, found.rows, found.indices, found.uniforms, found.token_ids,
        found.positions, found.contexts, found.slots, found.tables, found.slot, size, max_rows, max_blocks,
        groups, block_size, 256, num_warps=1,
    )  # fmt: skip
    return found


def publish_tokens(
    found: GatheredInputs, drawn: torch.Tensor | None, exchange: StepMailbox, newest: torch.Tensor
) -> None:
    """End a step: store drawn int64 [R], if it samples, as each row's newest token, and send it to the host."""
    _publish_tokens[found.rows.shape](
        found.rows, found.token_ids if drawn is None else drawn, found.slot, newest, exchange.drawn, exchange.turn,
        exchange.drawn.shape[1], drawn is not None, RING_SIZE, num_warps=1, **launch_options(),
    )  # fmt: skip


def change_tables(changes: torch.Tensor, tables: torch.Tensor) -> None:
    """Apply changes of block tables: `changes` int64 [2, N] are flat indices into `tables`, and the new block ids."""
    num_changes = changes.shape[1]
    _change[(cdiv(num_changes, CHANGES),)](changes, tables, num_changes, CHANGES, num_warps=4)
