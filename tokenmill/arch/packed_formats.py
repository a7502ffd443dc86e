"""Forms in which a GPU keeps a file's quantised matrices: the packed integers that its kernels multiply (their layout
is drawn in `ops/triton/quant/packed_int.py`). Pure arithmetic: planner and engine count these bytes.

    4-bit formats    4 bits a value; 8 where a row is not a number of whole spans of 4-bit words
    5 and 6 bits     8 bits a value
    tables           nf4 and fp4 as they are, IQ4 where that is asked for (`unproven.py`): 4 bits a value that number
                     one of 16 (`ops/triton/quant/packed_table.py`), and the scales of a file. Where the GPU does not
                     expand them fast (`widened`), where a row is not a number of whole spans, and in experts, IQ4 has
                     8 bits, as its table has integers, and nf4 and fp4 are expanded
    fp8              as it is where the GPU multiplies such numbers: one scale a row, or one of 4 bytes for each 128
                     columns of it; experts too
    NVFP4, MXFP4     as they are: 4 bits a value (`ops/triton/quant/packed_fp4.py`, of experts `quant/fp4.py`); 8 bits
                     where a row is not a number of whole spans, and on GPUs that expand them more slowly than they read
                     8-bit integers (`widened`), experts excepted
    others           expanded: 2 and 3 bits
    act order        columns of a group side by side, and 4 bytes for each column that say where it was (`is_ordered`)
    each group       a scale of 2 bytes, and a minimum of 2 bytes where the format has one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from tokenmill.arch.block_formats import BLOCK
from tokenmill.arch.families import BY_NAME
from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME, read_gguf_model
from tokenmill.arch.quantization import read_quantization
from tokenmill.arch.read import quantization_config
from tokenmill.arch.spec import ModelSpec
from tokenmill.arch.tensors import sources_of, tensors_of
from tokenmill.arch.unproven import is_chosen

TAKEN_APART = ("kv_up.weight", "out_groups.weight")  # of which each head or group has a part: plain numbers always
WHOLE = ("router.weight", *TAKEN_APART)  # a router is small, and other kernels read it
MAX_GROUP = 128
UNQUANTIZED = ("head.weight", *WHOLE)  # a head is the last thing that should be rounded while it is loaded
INT8_GROUP = 32  # columns that share a scale of two bytes in weights quantised to 8 bits while they are loaded
MX_GROUP = 32  # columns that share a power of two in MXFP4
NV_GROUP = 16  # columns that share a number of e4m3 in NVFP4
MX_CHUNK = 64  # columns that kernels take of a row of an expert of either at a time
FP4_SPAN = 128  # and of a row of other matrices
FP8_GROUP = 128  # columns that share a scale in fp8 matrices of blocks
INT4_GROUP = 128  # the same for 4 bits; a matrix whose columns it does not divide is not quantised
EXPANDED_BYTES = 128 << 20  # of a matrix at a time, at most, for products of many rows


@dataclass(frozen=True)
class Stored:
    """The format of a matrix in a file."""

    quant: str
    same_scales: int = 1  # so many neighbouring blocks have theirs in common
    is_widened: bool = False  # 4-bit floats become 8-bit integers; of codes of a table, those of integers
    is_ordered: bool = False  # columns of a group need not lie together: act order


FLOATS_OF_4_BITS = ("MXFP4", "NV4", "NV4D")
TABLE_SCALE_BYTES = {"NF4": 4, "FP4": 4, "IQ4_NL": 2, "IQ4_XS": 4}  # of formats whose codes number values of a table
WIDE_FORMATS = (*FLOATS_OF_4_BITS, *TABLE_SCALE_BYTES)


def widened(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The same formats for a GPU that keeps 4-bit floats and codes of a table, of plain matrices, as 8-bit integers;
    without those that it expands"""
    return {
        name: replace(one, is_widened=one.quant in WIDE_FORMATS)
        for name, one in stored.items()
        if one.quant in _FORMATS or one.quant not in TABLE_SCALE_BYTES
    }


@dataclass(frozen=True)
class PackedIntFormat:
    bits: int
    group: int  # columns that share a scale
    has_minima: bool
    span: int  # words whose first values are neighbours, as their second, ...
    is_of_experts: bool = False  # matrices of many experts, one below the other
    is_fp4: bool = False  # MXFP4's or NVFP4's own numbers and scales, which have no spans
    is_fp8: bool = False  # e4m3 with a float32 scale for each row, or for FP8_GROUP columns of it, likewise
    row_bytes: int = 0  # that a row has beside its groups'
    table: str = ""  # the format whose table values are codes of (`TABLE_SCALE_BYTES`); they have no spans either
    column_bytes: int = 0  # that a column has: its place where columns are in another order

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix; scales of large groups are kept twice, in both orders, except for experts"""
        size = prod(shape)
        if self.is_fp8:
            return size + size // self.group * 4
        if self.table:
            return size // 2 + size // self.group * TABLE_SCALE_BYTES[self.table]
        if self.is_fp4:
            scales = size // MX_CHUNK * 4 if self.is_of_experts else size // self.group
            return size // 2 + scales + size // shape[-1] * self.row_bytes
        is_twice = self.bits == 4 and self.span == 32 and self.group == MAX_GROUP and not self.is_of_experts
        of_columns = self.column_bytes * shape[-1]
        return of_columns + size * self.bits // 8 + size // self.group * (4 if self.has_minima or is_twice else 2)


@dataclass(frozen=True)
class _Format:
    bits: int
    group: int
    has_minima: bool


_FORMATS = {
    "Q4_0": _Format(4, 32, has_minima=False),
    "Q4_1": _Format(4, 32, has_minima=True),
    "Q4_K": _Format(4, 32, has_minima=True),
    "Q5_0": _Format(8, 32, has_minima=False),
    "Q5_1": _Format(8, 32, has_minima=True),
    "Q5_K": _Format(8, 32, has_minima=True),
    "Q6_K": _Format(8, 16, has_minima=False),
    "Q8_0": _Format(8, 32, has_minima=False),
    # numbers of a table, which are integers of 8 bits
    "IQ4_NL": _Format(8, 32, has_minima=False),
    "IQ4_XS": _Format(8, 32, has_minima=False),
    "MXFP4": _Format(8, 32, has_minima=False),
    "NV4": _Format(8, 16, has_minima=False),
    "NV4D": _Format(8, 16, has_minima=False),
    # what other makers write
    "G4": _Format(4, 32, has_minima=True),
    "G8": _Format(8, 32, has_minima=True),
    "B8": _Format(8, 32, has_minima=False),
}


def packed_int_format(name: str, shape: tuple[int, ...], stored: Stored | None) -> PackedIntFormat | None:
    """None where a matrix is not kept as the file has it."""
    if stored is not None and stored.quant == "F8":
        return _fp8_format(name, shape, stored)
    if stored is None or len(shape) < 2 or name.endswith(WHOLE):
        return None
    columns, is_of_experts = shape[-1], len(shape) == 3
    is_multiplied = not stored.is_widened and not name.endswith((*UNQUANTIZED, "embed.weight"))  # and not looked up
    is_table = stored.quant in TABLE_SCALE_BYTES and (stored.quant not in _FORMATS or is_chosen("gpu_iq4"))
    if is_table and is_multiplied and not is_of_experts and columns % FP4_SPAN == 0:
        group = next(size for size in (MAX_GROUP, 64, BLOCK) if BLOCK * stored.same_scales % size == 0)
        return PackedIntFormat(4, group, False, 0, table=stored.quant)
    if stored.quant not in _FORMATS:
        return None
    found = _FORMATS[stored.quant]
    if stored.quant in FLOATS_OF_4_BITS and columns % (MX_CHUNK if is_of_experts else FP4_SPAN) == 0:
        group, row_bytes = (MX_GROUP, 0) if stored.quant == "MXFP4" else (NV_GROUP, 4)
        if is_of_experts or is_multiplied:
            return PackedIntFormat(4, group, False, 0, is_of_experts, is_fp4=True, row_bytes=row_bytes)
    group = found.group * stored.same_scales
    group = next(size for size in (MAX_GROUP, 64, found.group) if group % size == 0 and columns % size == 0)
    for bits in (4, 8):
        for span in (32, 16):
            turn = span * 32 // bits  # columns that are multiplied together: whole groups
            if bits >= found.bits and span <= 2 * group and group <= turn and columns % turn == 0:
                places = 4 if stored.is_ordered else 0
                return PackedIntFormat(bits, group, found.has_minima, span, is_of_experts, column_bytes=places)
    return None


def _fp8_format(name: str, shape: tuple[int, ...], stored: Stored) -> PackedIntFormat | None:
    columns, is_of_experts = shape[-1], len(shape) == 3
    if name.endswith(UNQUANTIZED) or columns % INT4_GROUP or len(shape) not in (2, 3):
        return None
    if not is_of_experts and stored.same_scales * BLOCK >= columns:
        return PackedIntFormat(8, columns, has_minima=False, span=0, is_fp8=True)
    has_whole_groups = stored.same_scales * BLOCK % FP8_GROUP == 0 or stored.same_scales * BLOCK >= columns
    return PackedIntFormat(8, FP8_GROUP, False, 0, is_of_experts, is_fp8=True) if has_whole_groups else None


def stored_formats(path: Path, spec: ModelSpec) -> Mapping[str, Stored]:
    """Formats of those tensors of a checkpoint that may stay packed, under our names."""
    described = path if path.suffix == ".json" else path / "config.json"
    if described.is_file():
        return configured_formats(spec, quantization_config(described))
    if path.suffix != ".gguf":
        path = next(iter(sorted(path.glob("*.gguf"))), path)
    if not path.is_file() or spec.family not in BY_NAME:
        return {}
    tensors = read_gguf_model(path).tensors
    sources = sources_of(spec, BY_NAME[spec.family].gguf_traits.rules_for(tensors))
    found = {
        name: tensors[source.names[0]].type
        for name, source in sources.items()
        if source.names[0] in tensors and source.times is None and source.beside is None
    }
    return {name: Stored(quant) for name, quant in found.items() if quant in _FORMATS or quant in TABLE_SCALE_BYTES}


def drawable_formats(stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
    """Those formats of a checkpoint that random weights in its place have too: GGUF's, with scales of their own"""
    return {name: one for name, one in stored.items() if one.same_scales == 1 and one.quant in GGML_TYPE_BY_NAME}


def is_expanded(path: Path) -> bool:
    """Return whether a checkpoint's quantised matrices have no block format and are expanded on a CPU too."""
    config = quantization_config(path / "config.json") if (path / "config.json").is_file() else None
    return bool(config) and any(scheme.is_expanded_on_cpu for _, scheme in read_quantization(config or {}).schemes)


def configured_formats(spec: ModelSpec, config: Mapping[str, Any]) -> Mapping[str, Stored]:
    """Formats of the matrices of a checkpoint with this quantization_config, by what it says of them."""
    if not config or spec.family not in BY_NAME:
        return {}
    quantization = read_quantization(config)
    sources = sources_of(spec, BY_NAME[spec.family].hf_rules)
    found = {}
    for name, tensor in tensors_of(spec).items():
        if tensor.kind != "linear" or name.endswith(WHOLE) or name not in sources:
            continue
        scheme = quantization.scheme_of(sources[name].names[0].removesuffix(".weight"))
        if scheme is None or scheme.is_expanded:
            continue
        columns = tensor.shape[-1]
        same = max(1, (scheme.group or columns // BLOCK * BLOCK) // BLOCK)
        stored = Stored(scheme.quant, same, is_ordered=scheme.is_ordered)
        is_kept = stored.quant in _FORMATS or stored.quant in TABLE_SCALE_BYTES or stored.quant == "F8"
        if stored.quant == "F8" and not _fp8_format(name, tensor.shape, stored):
            is_kept = False
        if is_kept and not (scheme.is_ordered and len(tensor.shape) == 3):  # stacked experts are expanded then
            found[name] = stored
    return found
