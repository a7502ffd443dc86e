"""Experts of one token on Hopper, in two kernels with one program per multiprocessor:

    logits, x ─► act(gate) * up of each chosen expert and of shared ones ─► down of each, weighted and summed

Matrices arrive through a ring in shared memory, in chunks of eight rows, which the copy engine (TMA) fills in the order
in which they are needed, while earlier chunks are multiplied. Shared experts come first: their chunks are asked for
before the router's result is there, while attention is still computed on the same multiprocessor. The second kernel
asks for downs before the first one has ended elsewhere. To the copy engine a row is some lines of 128 or 256 columns;
lines beyond a row are filled with zeros.

Written in Gluon, where copies and layouts are explicit. A warp multiplies whole rows, so that sums need no barrier.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.arch.spec import Activation
from tokenmill.ops.interface import ExpertsWeight
from tokenmill.ops.triton.gemm.hopper import (
    activate,
    barrier,
    copy_to_shared,
    launch_dependents,
    new_barriers,
    wait_for_previous,
)
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import kernel_unspecialized, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_options

ROWS = gl.constexpr(8)  # of a chunk
CHUNKS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=3)
SLICE_COLUMNS = gl.constexpr(512)  # of each row that are multiplied at a time
# How a slice is distributed, by columns of a line: a warp has a whole row.
SLICES = {
    128: gl.BlockedLayout([1, 1, 8], [1, 2, 16], [8, 1, 1], [2, 1, 0]),
    256: gl.BlockedLayout([1, 1, 8], [1, 1, 32], [8, 1, 1], [2, 1, 0]),
}
OF_WARPS = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 64], [1, 32], [8, 1], [1, 0])))  # a number per warp
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
NO_ROW = gl.constexpr(1 << 30)  # a chunk beyond a matrix is filled with zeros, and nothing is read
RING_BYTES = 192 * 1024
NUM_WARPS = 8


@gluon.jit
def _choose(
    logits, EXPERTS: gl.constexpr, BLOCK: gl.constexpr, BITS: gl.constexpr, ACTIVE: gl.constexpr,
    RENORMALIZE: gl.constexpr,
):  # fmt: skip
    """Return the experts with the highest logits, BITS each, the highest logit, and the sum that weights are divided
    by. Each warp chooses for itself, without a barrier."""
    CHOICES: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [8, 1], [1, 0])
    every = gl.expand_dims(gl.arange(0, BLOCK, layout=gl.SliceLayout(0, CHOICES)), 0)
    every += gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, CHOICES)), 1) * 0
    found = gl.load(logits + every, mask=every < EXPERTS, other=float("-inf")).to(gl.float32)
    # bfloat16 logits are compared as integers, with their index in the lower half: of equal ones the first is chosen.
    bits = found.to(gl.int32, bitcast=True)
    left = (gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) & -65536) | (65535 - every)
    largest = gl.max(found, axis=1)
    exps = gl.exp(found - gl.expand_dims(largest, 1))
    ids = gl.max(left, axis=1).to(gl.int64) * 0
    for k in gl.static_range(ACTIVE):
        expert = 65535 - (gl.max(left, axis=1) & 65535)
        ids |= expert.to(gl.int64) << (BITS * k)
        left = gl.where(every == gl.expand_dims(expert, 1), -2147483648, left)
    if RENORMALIZE:
        exps = gl.where(left == -2147483648, exps, 0.0)
    return gl.max(ids, axis=0), gl.max(largest, axis=0), gl.max(gl.sum(exps, axis=1), axis=0)


@gluon.jit
def _id_of(ids, number, BITS: gl.constexpr):
    return ((ids >> (number * BITS)) & ((1 << BITS) - 1)).to(gl.int32)


@gluon.jit
def _ask_for(matrix, row, ring, copied, position, is_wanted, SLOTS: gl.constexpr, BYTES: gl.constexpr):
    """Start to copy eight rows of a matrix to the place in the ring from which `position` is read."""
    slot = position % SLOTS
    mbarrier.expect(copied.index(slot), BYTES, pred=is_wanted)
    copy_to_shared(matrix, [row, 0, 0], copied.index(slot), ring.index(slot), pred=is_wanted)


@gluon.jit
def _wait_for(copied, position, SLOTS: gl.constexpr):
    mbarrier.wait(copied.index(position % SLOTS), (position // SLOTS) & 1)


@gluon.jit
def _factors(vector, LINES: gl.constexpr, EACH: gl.constexpr, SLICE: gl.constexpr):
    """Load a vector [lines, columns] from shared memory as float32, for all rows of a chunk: slices of EACH lines."""
    found = ()
    for i in gl.static_range(0, LINES, EACH):
        factors = vector.slice(i, EACH).load(gl.SliceLayout(0, SLICE)).to(gl.float32)
        found = found + (gl.expand_dims(factors, 0),)  # type: ignore[assignment]
    return found


@gluon.jit
def _products(
    ring, position, factors, SLOTS: gl.constexpr, LINES: gl.constexpr, EACH: gl.constexpr, SLICE: gl.constexpr
):  # fmt: skip
    """Return the products of a chunk's rows and a vector, added up over the slices: [8, EACH, columns]"""
    chunk = ring.index(position % SLOTS)
    sums = chunk.slice(0, EACH, dim=1).load(SLICE).to(gl.float32) * factors[0]
    for i in gl.static_range(1, LINES // EACH):
        sums += chunk.slice(i * EACH, EACH, dim=1).load(SLICE).to(gl.float32) * factors[i]
    return sums


@gluon.jit
def _of_rows(products):
    """Return the sum of each row, [8], one per warp."""
    return gl.convert_layout(gl.sum(gl.reshape(products, (8, SLICE_COLUMNS)), axis=1), OF_WARPS)


@gluon.jit
def _up_row(
    unit, ids, num_experts, SHARED_UNITS: gl.constexpr, UNITS: gl.constexpr, INTER: gl.constexpr, BITS: gl.constexpr
):  # fmt: skip
    """Return the first gate row of a unit of eight rows; shared experts come first."""
    is_shared = unit < SHARED_UNITS
    first = gl.where(is_shared, unit, unit - SHARED_UNITS) * 8
    expert = gl.where(is_shared, num_experts + first // INTER, _id_of(ids, first // INTER, BITS))
    row = expert * (2 * INTER) + first % INTER
    return gl.where(unit < UNITS, row, NO_ROW)


@kernel_unspecialized("num_experts", jit=gluon.jit, is_large=True)
def _ring_up(
    x, logits, gate_up, inner, num_experts,
    ACTIVE: gl.constexpr, SHARED: gl.constexpr, EXPERTS: gl.constexpr, BLOCK: gl.constexpr, BITS: gl.constexpr,
    RENORMALIZE: gl.constexpr, INTER: gl.constexpr, LINES: gl.constexpr, LINE: gl.constexpr, SLICE: gl.constexpr,
    SLOTS: gl.constexpr, PROGRAMS: gl.constexpr, KIND: gl.constexpr, OVERLAPS: gl.constexpr,
) -> None:  # fmt: skip
    """inner [SHARED + ACTIVE, INTER] = act(gate x) * up x. A program has every PROGRAMS-th unit of eight rows."""
    SHARED_UNITS: gl.constexpr = SHARED * INTER // 8
    UNITS: gl.constexpr = (SHARED + ACTIVE) * INTER // 8
    ROUNDS: gl.constexpr = (UNITS + PROGRAMS - 1) // PROGRAMS
    AHEAD: gl.constexpr = min(SLOTS // 2, ROUNDS)
    IN_SLICE: gl.constexpr = SLICE_COLUMNS // LINE  # lines
    BYTES: gl.constexpr = ROWS * LINES * LINE * 2
    program = gl.program_id(0)
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, ROWS, LINES, LINE], gate_up.layout)
    copied = new_barriers(SLOTS)
    vector = gl.allocate_shared_memory(gl.bfloat16, [LINES, LINE], PLAIN)
    for i in gl.static_range(AHEAD):
        unit = program + i * PROGRAMS
        row = _up_row(unit, gl.to_tensor(0).to(gl.int64), num_experts, SHARED_UNITS, UNITS, INTER, BITS)
        for j in gl.static_range(2):
            _ask_for(gate_up, row + j * INTER, ring, copied, 2 * i + j, unit < SHARED_UNITS, SLOTS, BYTES)
    wait_for_previous(OVERLAPS)
    launch_dependents(OVERLAPS)  # only when the logits are ready: the next kernel reads them without waiting
    offs = gl.arange(0, LINES * LINE, layout=gl.BlockedLayout([8], [32], [8], [0]))
    values = gl.load(x + offs)
    ids, _, _ = _choose(logits, EXPERTS, BLOCK, BITS, ACTIVE, RENORMALIZE)
    for i in gl.static_range(AHEAD):
        unit = program + i * PROGRAMS
        row = _up_row(unit, ids, num_experts, SHARED_UNITS, UNITS, INTER, BITS)
        for j in gl.static_range(2):
            _ask_for(gate_up, row + j * INTER, ring, copied, 2 * i + j, unit >= SHARED_UNITS, SLOTS, BYTES)
    vector.store(gl.reshape(values, (LINES, LINE)))
    factors = _factors(vector, LINES, IN_SLICE, SLICE)
    warps = gl.arange(0, 8, layout=OF_WARPS)
    for i in range(ROUNDS):
        _wait_for(copied, 2 * i, SLOTS)
        _wait_for(copied, 2 * i + 1, SLOTS)
        gates = _products(ring, 2 * i, factors, SLOTS, LINES, IN_SLICE, SLICE)
        ups = _products(ring, 2 * i + 1, factors, SLOTS, LINES, IN_SLICE, SLICE)
        barrier()
        following = program + (i + AHEAD) * PROGRAMS
        row = _up_row(following, ids, num_experts, SHARED_UNITS, UNITS, INTER, BITS)
        for j in gl.static_range(2):
            _ask_for(gate_up, row + j * INTER, ring, copied, 2 * (i + AHEAD) + j, i + AHEAD < ROUNDS, SLOTS, BYTES)
        unit = program + i * PROGRAMS
        result = activate(_of_rows(gates), KIND) * _of_rows(ups)
        gl.store(inner + unit * 8 + warps, result.to(inner.dtype.element_ty), mask=unit < UNITS)


@gluon.jit
def _down_row(
    position, program, ids, num_experts, SHARED: gl.constexpr, HIDDEN: gl.constexpr, EACH: gl.constexpr,
    PROGRAMS: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Return the first row of the chunk `position`: EACH chunks of an expert follow each other."""
    k, row = position // EACH, (program + position % EACH * PROGRAMS) * 8
    expert = gl.where(k < SHARED, num_experts + k, _id_of(ids, gl.maximum(k - SHARED, 0), BITS))
    return gl.where(row < HIDDEN, expert * HIDDEN + row, NO_ROW)


@kernel_unspecialized("num_experts", jit=gluon.jit, is_large=True)
def _ring_down(
    inner, logits, down, out, num_experts,
    ACTIVE: gl.constexpr, SHARED: gl.constexpr, EXPERTS: gl.constexpr, BLOCK: gl.constexpr, BITS: gl.constexpr,
    RENORMALIZE: gl.constexpr, HIDDEN: gl.constexpr, INTER: gl.constexpr, LINES: gl.constexpr, LINE: gl.constexpr,
    SLICE: gl.constexpr, SLOTS: gl.constexpr, PROGRAMS: gl.constexpr, OVERLAPS: gl.constexpr,
) -> None:  # fmt: skip
    """out [HIDDEN]; a program has every PROGRAMS-th unit of eight rows of it, for all experts."""
    launch_dependents(OVERLAPS)
    EACH: gl.constexpr = (HIDDEN // 8 + PROGRAMS - 1) // PROGRAMS
    NUM: gl.constexpr = SHARED + ACTIVE
    IN_SLICE: gl.constexpr = SLICE_COLUMNS // LINE  # lines
    BYTES: gl.constexpr = ROWS * LINES * LINE * 2
    program = gl.program_id(0)
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, ROWS, LINES, LINE], down.layout)
    copied = new_barriers(SLOTS)
    for i in gl.static_range(min(SLOTS, SHARED * EACH)):
        row = _down_row(i, program, gl.to_tensor(0).to(gl.int64), num_experts, SHARED, HIDDEN, EACH, PROGRAMS, BITS)
        _ask_for(down, row, ring, copied, i, i < NUM * EACH, SLOTS, BYTES)
    ids, largest, whole = _choose(logits, EXPERTS, BLOCK, BITS, ACTIVE, RENORMALIZE)
    for i in gl.static_range(min(SLOTS, SHARED * EACH), SLOTS):
        row = _down_row(i, program, ids, num_experts, SHARED, HIDDEN, EACH, PROGRAMS, BITS)
        _ask_for(down, row, ring, copied, i, i < NUM * EACH, SLOTS, BYTES)
    wait_for_previous(OVERLAPS)
    offs = gl.arange(0, LINES * LINE, layout=gl.BlockedLayout([8], [32], [8], [0]))
    found = ()
    for k in gl.static_range(NUM):
        values = gl.load(inner + k * INTER + offs, mask=offs < INTER, other=0.0)
        found = found + (values,)  # type: ignore[assignment]
    vectors = gl.allocate_shared_memory(gl.bfloat16, [NUM, LINES, LINE], PLAIN)
    for k in gl.static_range(NUM):
        vectors.index(k).store(gl.reshape(found[k], (LINES, LINE)))
    sums = ()
    for _ in gl.static_range(EACH):
        sums = sums + (gl.zeros((8, IN_SLICE, LINE), gl.float32, layout=SLICE),)  # type: ignore[assignment]
    for k in range(NUM):
        logit = gl.load(logits + _id_of(ids, gl.maximum(k - SHARED, 0), BITS)).to(gl.float32)
        weight = gl.where(k < SHARED, 1.0, gl.exp(logit - largest) / whole)
        factors = _factors(vectors.index(k), LINES, IN_SLICE, SLICE)
        for j in gl.static_range(EACH):
            _wait_for(copied, k * EACH + j, SLOTS)
        added = ()
        for j in gl.static_range(EACH):
            product = _products(ring, k * EACH + j, factors, SLOTS, LINES, IN_SLICE, SLICE)
            added = added + (sums[j] + weight * product,)  # type: ignore[assignment]
        sums = added
        barrier()
        for j in gl.static_range(EACH):
            following = k * EACH + j + SLOTS
            row = _down_row(following, program, ids, num_experts, SHARED, HIDDEN, EACH, PROGRAMS, BITS)
            _ask_for(down, row, ring, copied, following, following < NUM * EACH, SLOTS, BYTES)
    warps = gl.arange(0, 8, layout=OF_WARPS)
    for j in gl.static_range(EACH):
        row = (program + j * PROGRAMS) * 8
        gl.store(out + row + warps, _of_rows(sums[j]).to(out.dtype.element_ty), mask=row < HIDDEN)


def _lines(matrix: torch.Tensor, line: int) -> TensorDescriptor:
    """Describe a matrix [rows, columns] of any number of experts by lines of columns."""
    lines = matrix.view(-1, matrix.shape[-1] // line, line)
    return TensorDescriptor.from_tensor(lines, [ROWS.value, next_power_of_2(lines.shape[1]), line], CHUNKS)


def ring_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    packed: ExpertsWeight,
    num_active: int,
    activation: Activation,
    *,
    renormalize: bool,
) -> torch.Tensor:
    """x [1, H], router logits [1, experts] → weighted sum of the chosen experts [1, H]"""
    gate_up, down = packed.packed
    hidden, inter, shared, routed = x.shape[1], down.shape[2], packed.num_shared, logits.shape[1]
    programs, block = capabilities_of(x.device).tuning.multiprocessors, max(64, next_power_of_2(routed))
    inner, out = x.new_empty(shared + num_active, inter), torch.empty_like(x)
    up_line, down_line = 256 if hidden % 256 == 0 else 128, 256 if inter % 256 == 0 else 128
    up_lines, down_lines = hidden // up_line, next_power_of_2(inter // down_line)
    vectors = (shared + num_active) * down_lines * down_line * 2
    _ring_up[(programs,)](
        x, logits, _lines(gate_up, up_line), inner, routed, num_active, shared, routed, block, block.bit_length() - 1,
        renormalize, inter, up_lines, up_line, SLICES[up_line],
        RING_BYTES // (ROWS.value * hidden * 2) // 2 * 2, programs, activation,
        num_warps=NUM_WARPS, **launch_options(),
    )  # fmt: skip
    _ring_down[(programs,)](
        inner, logits, _lines(down, down_line), out, routed, num_active, shared, routed, block, block.bit_length() - 1,
        renormalize, hidden, inter, down_lines, down_line, SLICES[down_line],
        (RING_BYTES - vectors) // (ROWS.value * down_lines * down_line * 2), programs,
        num_warps=NUM_WARPS, **launch_options(),
    )  # fmt: skip
    return out
