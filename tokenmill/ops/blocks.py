"""Dequantisation of the common block formats with torch operations, on any device.

A block holds a few half-precision scales and its weights as small integers: the low four bits packed two to a byte (the
first half of the block in the low nibbles), fifth and sixth bits separately. `expanded` applies the same operations in
the same order as the format's reference implementation, so results are bit-identical to it.

    Q4_0  d[2] q[16]               d * (q - 8)              Q4_K  d[2] m[2] scales[12] q[128]      8 groups of 32:
    Q4_1  d[2] m[2] q[16]          d * q + m                      d * scale * q - m * min
    Q5_0  d[2] high[4] q[16]       d * (q - 16)             Q5_K  d[2] m[2] scales[12] high[32] q[128]
    Q5_1  d[2] m[2] high[4] q[16]  d * q + m                Q6_K  q[128] high[64] scales[16] d[2]  16 groups of 16:
    Q8_0  d[2] q[32]               d * q                          d * scale * (q - 32)

Some 4-bit formats index a table of values:

    IQ4_NL  d[2] q[16]             d * table[q]             MXFP4  e[1] q[16]      2 ** (e - 128) * table[q]
    IQ4_XS  d[2] high[2] low[4] q[128]   8 groups of 32: d * (scale - 32) * table[q], the table of IQ4_NL

`arch/block_formats.py` describes the formats that are not GGUF's. 8-bit floats and tables of floats are not scaled
integers: they are only expanded (`_FLOATS`), or kept as indices into their table (`TABLES`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

IQ4_NL_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values 0, 0.5, 1 ... -6
# bitsandbytes' formats: quantiles of the normal distribution (NF4), floats of 2 exponent bits and 1 mantissa bit (FP4)
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_TABLE = tuple(sign * size / 12 for sign in (1, -1) for size in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
FLOAT_TABLES = {"NF4": NF4_TABLE, "FP4": FP4_TABLE}
TABLES: dict[str, tuple[float, ...]] = {**FLOAT_TABLES, "IQ4_NL": IQ4_NL_TABLE, "IQ4_XS": IQ4_NL_TABLE}


@dataclass(frozen=True)
class BlockParts:
    """Blocks as integer codes and group parameters: weight = scale * (code - zero) + minimum."""

    codes: torch.Tensor  # uint8 [blocks, groups, columns of a group]
    zero: int
    scales: torch.Tensor  # float32 [blocks, groups]
    minima: torch.Tensor | None = None  # float32 [blocks, groups]; None: all 0
    zeros: torch.Tensor | None = None  # float32 [blocks, groups], per group instead of `zero`


def is_known(quant: str | None) -> bool:
    """Return whether `expanded` supports this block format."""
    return quant in FORMATS or quant in _FLOATS


def expanded(quant: str, blocks: torch.Tensor) -> torch.Tensor:
    """Dequantise blocks: uint8 [blocks, bytes] → float32 [blocks, values]."""
    if quant in _FLOATS:
        return _FLOATS[quant](blocks)
    parts = FORMATS[quant](blocks)
    if parts.zeros is not None:
        return ((parts.codes.float() - parts.zeros.unsqueeze(2)) * parts.scales.unsqueeze(2)).flatten(1)
    values = parts.codes.view(torch.int8).add(-parts.zero).float() * parts.scales.unsqueeze(2)
    return (values if parts.minima is None else values + parts.minima.unsqueeze(2)).flatten(1)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Read the float16 at byte `start` of each block: float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _float(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Read the float32 at byte `start` of each block: float32 [blocks, 1]."""
    return blocks[:, start : start + 4].contiguous().view(torch.float32)


def _e4m3(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [...] → float32 [...]"""
    return packed.contiguous().view(torch.float8_e4m3fn).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] → uint8 [..., 2n]: all low nibbles, then all high ones."""
    return torch.cat([packed & 0x0F, packed >> 4], dim=-1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, n] → uint8 [blocks, 8n]: bits, lowest first."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & 1).flatten(1)


def _one_group(codes: torch.Tensor, zero: int, scales: torch.Tensor, minima: torch.Tensor | None = None) -> BlockParts:
    """codes: uint8 [blocks, columns]"""
    return BlockParts(codes.unsqueeze(1), zero, scales, minima)


def _q4_0(blocks: torch.Tensor) -> BlockParts:
    return _one_group(_nibbles(blocks[:, 2:]), 8, _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> BlockParts:
    return _one_group(_nibbles(blocks[:, 4:]), 0, _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> BlockParts:
    return _one_group(_nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4), 16, _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> BlockParts:
    codes = _nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return _one_group(codes, 0, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> BlockParts:
    return _one_group(blocks[:, 2:] ^ 128, 128, _half(blocks, 0))


def _looked_up(packed: torch.Tensor, table: tuple[int, ...], zero: int) -> torch.Tensor:
    """Replace nibbles by table values plus `zero`: uint8 [blocks, n] → uint8 [blocks, 2n]."""
    numbers = torch.tensor([number + zero for number in table], dtype=torch.uint8, device=packed.device)
    return numbers[_nibbles(packed).long()]


def _iq4(quant: str, blocks: torch.Tensor) -> BlockParts:
    codes, scales = table_parts(quant, blocks)
    numbers = torch.tensor([number + 128 for number in IQ4_NL_TABLE], dtype=torch.uint8, device=blocks.device)
    return BlockParts(numbers[codes.long()], 128, scales)


def _mxfp4(blocks: torch.Tensor) -> BlockParts:
    exponents = blocks[:, :1].int()
    small = 0x00200000 << exponents.clamp(max=1)  # the two smallest scales are subnormal in float32
    scales = torch.where(exponents < 2, small, (exponents - 1) << 23).view(torch.float32)
    return _one_group(_looked_up(blocks[:, 1:], MXFP4_TABLE, 16), 16, scales)


def _g4(blocks: torch.Tensor) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 8:]).unsqueeze(1), 0, _float(blocks, 0), zeros=_float(blocks, 4))


def _g8(blocks: torch.Tensor) -> BlockParts:
    return BlockParts(blocks[:, 8:].unsqueeze(1), 0, _float(blocks, 0), zeros=_float(blocks, 4))


def _b8(blocks: torch.Tensor) -> BlockParts:
    return _one_group(blocks[:, 4:] ^ 128, 128, _float(blocks, 0) * (1 / 127))


def _e2m1(blocks: torch.Tensor, scales: torch.Tensor) -> BlockParts:
    """Halve the scales, since the table's values are doubled to be integers."""
    codes = _looked_up(blocks[:, 6:], MXFP4_TABLE, 16).view(-1, 2, 16)
    return BlockParts(codes, 16, scales * 0.5)


def _nv4(blocks: torch.Tensor) -> BlockParts:
    return _e2m1(blocks, _e4m3(blocks[:, 4:6]) * _float(blocks, 0))


def _nv4d(blocks: torch.Tensor) -> BlockParts:
    return _e2m1(blocks, _e4m3(blocks[:, 4:6]) / _float(blocks, 0))


def _b8_values(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantise in bitsandbytes' order of multiplications."""
    return blocks[:, 4:].view(torch.int8).float() * _float(blocks, 0) * (1 / 127)


def _f8(blocks: torch.Tensor) -> torch.Tensor:
    return _e4m3(blocks[:, 4:]) * _float(blocks, 0)


def table_parts(quant: str, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes uint8 [blocks, groups, 32] and scales float32 [blocks, groups]: weight = scale * table[code]."""
    if quant in FLOAT_TABLES:
        return _nibbles(blocks[:, 4:]).unsqueeze(1), _float(blocks, 0)
    if quant == "IQ4_NL":
        return _nibbles(blocks[:, 2:]).unsqueeze(1), _half(blocks, 0)
    low = _nibbles(blocks[:, 4:8].unsqueeze(2)).flatten(1)  # two scales per byte, the first in the low nibble
    high = _bits(blocks[:, 2:4]).view(-1, 8, 2)
    scales = (low | (high[..., 0] << 4) | (high[..., 1] << 5)).to(torch.int8) - 32
    return _nibbles(blocks[:, 8:].reshape(-1, 8, 16)), _half(blocks, 0) * scales.float()


def _from_table(quant: str, blocks: torch.Tensor) -> torch.Tensor:
    codes, scales = table_parts(quant, blocks)
    table = torch.tensor(TABLES[quant], dtype=torch.float32, device=blocks.device)
    return (scales.unsqueeze(2) * table[codes.long()]).flatten(1)


def _scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack eight 6-bit scales and mins from 12 bytes; the top bits of the first four hold those of the last four."""
    scale, minimum, low = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat([scale & 0x3F, (low & 0x0F) | ((scale >> 2) & 0x30)], dim=1)
    mins = torch.cat([minimum & 0x3F, (low >> 4) | ((minimum >> 2) & 0x30)], dim=1)
    return scales.float(), mins.float()


def _eight_groups(blocks: torch.Tensor, codes: torch.Tensor) -> BlockParts:
    """codes: uint8 [blocks, 8, 32]"""
    scales, mins = _scales_and_mins(blocks[:, 4:16].contiguous())
    return BlockParts(codes, 0, _half(blocks, 0) * scales, -(_half(blocks, 2) * mins))


def _q4_k(blocks: torch.Tensor) -> BlockParts:
    return _eight_groups(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> BlockParts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    # byte j, bit g: fifth bit of weight j in group g
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = (blocks[:, 16:48].unsqueeze(1) >> places) & 1
    return _eight_groups(blocks, low | (high << 4))


def _q6_k(blocks: torch.Tensor) -> BlockParts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    places = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> places) & 3).view(-1, 8, 32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return BlockParts((low | (high << 4)).view(-1, 16, 16), 32, _half(blocks, 208) * scales)


FORMATS: dict[str, Callable[[torch.Tensor], BlockParts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": lambda blocks: _iq4("IQ4_NL", blocks),
    "IQ4_XS": lambda blocks: _iq4("IQ4_XS", blocks),
    "MXFP4": _mxfp4,
    "G4": _g4,
    "G8": _g8,
    "B8": _b8,
    "NV4": _nv4,
    "NV4D": _nv4d,
}
_FLOATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "B8": _b8_values,
    "F8": _f8,
    "NF4": lambda blocks: _from_table("NF4", blocks),
    "FP4": lambda blocks: _from_table("FP4", blocks),
}
