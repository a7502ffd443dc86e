"""Matrices of bitsandbytes: nf4 and fp4 with one scale per `blocksize` values, int8 with one per row.

4 bits   X.weight                      uint8 [values / 2, 1], row after row, the first value of a pair in the high
                                       nibble (some files declare another type for these bytes)
         X.weight.quant_state.bitsandbytes__nf4    JSON as bytes: shape, blocksize, dtype, nested_offset
         X.weight.quant_map            float32 [16]
         X.weight.absmax               float32 [values / blocksize]; or uint8 if it is quantised itself:
         X.weight.nested_absmax, X.weight.nested_quant_map [256]      map[absmax] * nested_absmax + offset
8 bits   X.weight int8 [out, in], X.SCB float32 [out]                 value = number * SCB / 127
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from tokenmill.arch.block_formats import BLOCK
from tokenmill.errors import DamagedFile
from tokenmill.ops.blocks import FLOAT_TABLES
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.checkpoint import SafetensorsCheckpoint
from tokenmill.weights.scaled_blocks import in_blocks, nibble_pairs, with_headers
from tokenmill.weights.stored_matrix import StoredMatrix, finite, refuse_parts

_STATE = ".quant_state.bitsandbytes__"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_COLUMN_ORDERS = "_format"  # of int8: 0 is row-major, others were for older GPUs


def find(checkpoint: SafetensorsCheckpoint, config: Mapping[str, Any]) -> dict[str, StoredMatrix]:
    found = {}
    for name in checkpoint.shapes:
        weight, _, kind = name.partition(_STATE)
        if kind:
            found[weight] = _four_bits(checkpoint, weight, kind)
        elif name.endswith(".SCB"):
            weight = name.removesuffix(".SCB") + ".weight"
            found[weight] = _eight_bits(checkpoint, weight, name)
    return found


# ── 4 bits ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _State:
    """The quantisation state stored with a matrix."""

    shape: tuple[int, ...]
    blocksize: int
    offset: float
    nested_blocksize: int


def _state(checkpoint: SafetensorsCheckpoint, name: str) -> _State:
    try:
        found = json.loads(bytes(checkpoint.tensor(name).view(torch.uint8).tolist()))
        shape = tuple(int(size) for size in found["shape"])
        nested = int(found.get("nested_blocksize") or 256)
        state = _State(shape, int(found["blocksize"]), float(found.get("nested_offset") or 0.0), nested)
        if len(shape) != 2 or min(*shape, state.blocksize, nested) < 1:
            raise ValueError(shape)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedFile(f"{checkpoint.place}: {name!r} does not describe a matrix") from None
    return state


def _four_bits(checkpoint: SafetensorsCheckpoint, weight: str, kind: str) -> StoredMatrix:
    state = _state(checkpoint, f"{weight}{_STATE}{kind}")
    parts = [f"{weight}{_STATE}{kind}", weight]
    parts += [weight + part for part in _PARTS if weight + part in checkpoint.shapes]
    scales = checkpoint.shapes.get(f"{weight}.absmax", ())
    if prod(state.shape) % state.blocksize or scales != (prod(state.shape) // state.blocksize,):
        refuse_parts(checkpoint.place, weight, matrix=state.shape, absmax=scales)
    return StoredMatrix(tuple(parts), state.shape, partial(_load_four_bits, checkpoint, kind, state))


def _load_four_bits(checkpoint: SafetensorsCheckpoint, kind: str, state: _State, name: str) -> RawTensor:
    packed = checkpoint.tensor(name).contiguous().view(torch.uint8).flatten()
    if packed.numel() * 2 != prod(state.shape):
        refuse_parts(checkpoint.place, name, matrix=state.shape, numbers=tuple(packed.shape))
    numbers = torch.stack((packed >> 4, packed & 15), dim=1).view(state.shape)
    scales = _scales(checkpoint, name, state)
    table = checkpoint.tensor(f"{name}.quant_map").float()
    quant = kind.upper()
    columns, every = state.shape[1], state.blocksize // BLOCK
    is_known = quant in FLOAT_TABLES and torch.equal(table, torch.tensor(FLOAT_TABLES[quant]))
    if not is_known or state.blocksize % BLOCK or columns % state.blocksize:
        if table.shape != (16,):
            refuse_parts(checkpoint.place, name, quant_map=tuple(table.shape))
        values = table[numbers.flatten().long()].view(-1, state.blocksize) * scales.unsqueeze(1)
        return RawTensor(name, state.shape, values.view(state.shape))
    header = scales.view(state.shape[0], -1).repeat_interleave(every, dim=1).unsqueeze(2)
    blocks = nibble_pairs(in_blocks(numbers, BLOCK))
    return with_headers(name, state.shape, header, blocks, quant, blocks_per_scale=every)


def _scales(checkpoint: SafetensorsCheckpoint, name: str, state: _State) -> torch.Tensor:
    absmax = checkpoint.tensor(f"{name}.absmax")
    if absmax.dtype != torch.uint8:
        return finite(checkpoint, f"{name}.absmax")
    table, nested = (checkpoint.shapes.get(f"{name}.nested_{part}", ()) for part in ("quant_map", "absmax"))
    if table != (256,) or nested != (-(-absmax.numel() // state.nested_blocksize),):
        refuse_parts(checkpoint.place, name, absmax=tuple(absmax.shape), nested_quant_map=table, nested_absmax=nested)
    outer = finite(checkpoint, f"{name}.nested_absmax").repeat_interleave(state.nested_blocksize)[: absmax.numel()]
    return finite(checkpoint, f"{name}.nested_quant_map")[absmax.long()] * outer + state.offset


# ── 8 bits ───────────────────────────────────────────────────────────────────────────────────────────────


def _eight_bits(checkpoint: SafetensorsCheckpoint, weight: str, scales: str) -> StoredMatrix:
    shape = checkpoint.shapes.get(weight, ())
    if checkpoint.dtypes.get(weight) != "I8" or len(shape) != 2 or checkpoint.shapes[scales] != shape[:1]:
        refuse_parts(checkpoint.place, weight, weight=shape, SCB=checkpoint.shapes[scales])
    order = weight + _COLUMN_ORDERS
    parts = (weight, scales, order) if order in checkpoint.shapes else (weight, scales)
    return StoredMatrix(parts, shape, partial(_load_eight_bits, checkpoint, scales))


def _load_eight_bits(checkpoint: SafetensorsCheckpoint, scales_name: str, name: str) -> RawTensor:
    order = name + _COLUMN_ORDERS
    if order in checkpoint.shapes and int(checkpoint.tensor(order).flatten()[0]):
        raise DamagedFile(f"{checkpoint.place}: {name!r} is not stored in row-major order", hint="save the model again")
    numbers, scales = checkpoint.tensor(name), finite(checkpoint, scales_name)
    shape = (numbers.shape[0], numbers.shape[1])
    if shape[1] % BLOCK:
        return RawTensor(name, shape, numbers.float() * scales.unsqueeze(1) * (1 / 127))
    num_blocks = shape[1] // BLOCK
    header = scales.view(-1, 1, 1).expand(shape[0], num_blocks, 1)
    blocks = in_blocks(numbers.view(torch.uint8), BLOCK)
    return with_headers(name, shape, header, blocks, "B8", blocks_per_scale=num_blocks)
