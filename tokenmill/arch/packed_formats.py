"""The formats in which a GPU stores a file's quantised matrices: the packed integers that its kernels multiply (layout:
`ops/triton/quant/packed_int.py`). Pure arithmetic: the planner and the engine compute memory from it.

    4-bit formats    4 bits per value; 8 if a row is not a multiple of the span of 4-bit words
    5 and 6 bits     8 bits per value
    tables           nf4 and fp4 unchanged, IQ4 if enabled (`unproven.py`): a 4-bit index into a table of 16 values
                     (`ops/triton/quant/packed_table.py`), and the file's scales. On a GPU that dequantizes them slowly
                     (`widened`), if a row is not a multiple of the span, and in experts, IQ4 is stored in 8 bits, since
                     its table contains integers, and nf4 and fp4 are dequantized
    fp8              unchanged if the GPU multiplies fp8: one scale per row, or one of 4 bytes per 128 columns of a row;
                     experts too
    NVFP4, MXFP4     unchanged: 4 bits per value (`ops/triton/quant/packed_fp4.py`, for experts `quant/fp4.py`); 8 bits
                     if a row is not a multiple of the span, and, except for experts, on GPUs that dequantize them more
                     slowly than they read 8-bit integers (`widened`)
    others           dequantized: 2 and 3 bits
    act order        columns sorted by group, with 4 bytes per column for its original index (`is_ordered`)
    each group       a scale of 2 bytes, and a minimum of 2 bytes if the format has one
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

SPLIT_BY_HEADS = ("kv_up.weight", "out_groups.weight")  # each head or group has its own part: always unquantised
NEVER_PACKED = ("router.weight", *SPLIT_BY_HEADS)  # a router is small, and other kernels read it
MAX_GROUP = 128
UNQUANTIZED = ("head.weight", *NEVER_PACKED)  # the head is the most sensitive to quantisation at load time
INT8_GROUP = 32  # columns that share a 2-byte scale in weights quantised to 8 bits at load time
MX_GROUP = 32  # columns that share a power of two in MXFP4
NV_GROUP = 16  # columns that share an e4m3 scale in NVFP4
MX_CHUNK = 64  # columns of an expert's row that kernels process at a time, in both formats
FP4_SPAN = 128  # the same for rows of other matrices
FP8_GROUP = 128  # columns that share a scale in fp8 matrices with blocks
INT4_GROUP = 128  # columns that share a scale in 4-bit weights quantised at load time; others stay unquantised
EXPANDED_BYTES = 128 << 20  # limit for a matrix that is dequantized temporarily, for products of many rows


@dataclass(frozen=True)
class StoredFormat:
    """The format of a matrix in a file."""

    quant: str
    blocks_per_scale: int = 1  # neighbouring blocks that share one scale
    is_widened: bool = False  # 4-bit floats, and indices of a table of integers, become 8-bit integers
    is_ordered: bool = False  # act order: columns of a group need not be neighbours


FLOATS_OF_4_BITS = ("MXFP4", "NV4", "NV4D")
TABLE_SCALE_BYTES = {"NF4": 4, "FP4": 4, "IQ4_NL": 2, "IQ4_XS": 4}  # of formats whose codes are indices into a table
WIDE_FORMATS = (*FLOATS_OF_4_BITS, *TABLE_SCALE_BYTES)


def widened(stored: Mapping[str, StoredFormat]) -> dict[str, StoredFormat]:
    """Return the formats for a GPU that stores 4-bit floats and table indices (except experts) as 8-bit integers,
    without the formats that it dequantizes."""
    return {
        name: replace(one, is_widened=one.quant in WIDE_FORMATS)
        for name, one in stored.items()
        if one.quant in _FORMATS or one.quant not in TABLE_SCALE_BYTES
    }


@dataclass(frozen=True)
class PackedIntFormat:
    """The layout of one packed matrix on a GPU."""

    bits: int
    group: int  # columns that share a scale
    has_minima: bool
    span: int  # number of words that are interleaved: their first values are neighbours, then their second, ...
    is_of_experts: bool = False  # matrices of many experts, stacked
    is_fp4: bool = False  # MXFP4's or NVFP4's own values and scales; `span` is unused
    is_fp8: bool = False  # e4m3 with a float32 scale per row, or per FP8_GROUP columns of it; `span` is unused
    row_bytes: int = 0  # further bytes per row
    table: str = ""  # the format (of `TABLE_SCALE_BYTES`) whose table the values index; `span` is unused
    column_bytes: int = 0  # further bytes per column: its original index with act order

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a matrix. Scales of large groups are stored twice, in both orders, except for experts."""
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
    # the tables contain 8-bit integers
    "IQ4_NL": _Format(8, 32, has_minima=False),
    "IQ4_XS": _Format(8, 32, has_minima=False),
    "MXFP4": _Format(8, 32, has_minima=False),
    "NV4": _Format(8, 16, has_minima=False),
    "NV4D": _Format(8, 16, has_minima=False),
    # formats of other quantisers
    "G4": _Format(4, 32, has_minima=True),
    "G8": _Format(8, 32, has_minima=True),
    "B8": _Format(8, 32, has_minima=False),
}


def packed_int_format(name: str, shape: tuple[int, ...], stored: StoredFormat | None) -> PackedIntFormat | None:
    """Return the packed format of a matrix; None if it is not stored packed."""
    if stored is not None and stored.quant == "F8":
        return _fp8_format(name, shape, stored)
    if stored is None or len(shape) < 2 or name.endswith(NEVER_PACKED):
        return None
    columns, is_of_experts = shape[-1], len(shape) == 3
    is_multiplied = not stored.is_widened and not name.endswith((*UNQUANTIZED, "embed.weight"))  # and not looked up
    is_table = stored.quant in TABLE_SCALE_BYTES and (stored.quant not in _FORMATS or is_chosen("gpu_iq4"))
    if is_table and is_multiplied and not is_of_experts and columns % FP4_SPAN == 0:
        group = next(size for size in (MAX_GROUP, 64, BLOCK) if BLOCK * stored.blocks_per_scale % size == 0)
        return PackedIntFormat(4, group, False, 0, table=stored.quant)
    if stored.quant not in _FORMATS:
        return None
    found = _FORMATS[stored.quant]
    if stored.quant in FLOATS_OF_4_BITS and columns % (MX_CHUNK if is_of_experts else FP4_SPAN) == 0:
        group, row_bytes = (MX_GROUP, 0) if stored.quant == "MXFP4" else (NV_GROUP, 4)
        if is_of_experts or is_multiplied:
            return PackedIntFormat(4, group, False, 0, is_of_experts, is_fp4=True, row_bytes=row_bytes)
    group = found.group * stored.blocks_per_scale
    group = next(size for size in (MAX_GROUP, 64, found.group) if group % size == 0 and columns % size == 0)
    for bits in (4, 8):
        for span in (32, 16):
            turn = span * 32 // bits  # columns that are multiplied together; must be whole groups
            if bits >= found.bits and span <= 2 * group and group <= turn and columns % turn == 0:
                index_bytes = 4 if stored.is_ordered else 0
                return PackedIntFormat(bits, group, found.has_minima, span, is_of_experts, column_bytes=index_bytes)
    return None


def _fp8_format(name: str, shape: tuple[int, ...], stored: StoredFormat) -> PackedIntFormat | None:
    columns, is_of_experts = shape[-1], len(shape) == 3
    if name.endswith(UNQUANTIZED) or columns % INT4_GROUP or len(shape) not in (2, 3):
        return None
    if not is_of_experts and stored.blocks_per_scale * BLOCK >= columns:
        return PackedIntFormat(8, columns, has_minima=False, span=0, is_fp8=True)
    has_whole_groups = stored.blocks_per_scale * BLOCK % FP8_GROUP == 0 or stored.blocks_per_scale * BLOCK >= columns
    return PackedIntFormat(8, FP8_GROUP, False, 0, is_of_experts, is_fp8=True) if has_whole_groups else None


def stored_formats(path: Path, spec: ModelSpec) -> Mapping[str, StoredFormat]:
    """Return the formats of those tensors of a checkpoint that can stay packed, by our names."""
    config = path if path.suffix == ".json" else path / "config.json"
    if config.is_file():
        return configured_formats(spec, quantization_config(config))
    if path.suffix != ".gguf":
        path = next(iter(sorted(path.glob("*.gguf"))), path)
    if not path.is_file() or spec.family not in BY_NAME:
        return {}
    tensors = read_gguf_model(path).tensors
    sources = sources_of(spec, BY_NAME[spec.family].gguf_traits.rules_for(tensors))
    found = {
        name: tensors[source.names[0]].type
        for name, source in sources.items()
        if source.names[0] in tensors and source.times is None and source.values is None
    }
    return {
        name: StoredFormat(quant) for name, quant in found.items() if quant in _FORMATS or quant in TABLE_SCALE_BYTES
    }


def dummy_formats(stored: Mapping[str, StoredFormat]) -> Mapping[str, StoredFormat]:
    """Return the formats of a checkpoint that dummy weights can have too: GGUF's, with one scale per block."""
    return {name: one for name, one in stored.items() if one.blocks_per_scale == 1 and one.quant in GGML_TYPE_BY_NAME}


def is_expanded(path: Path) -> bool:
    """Return whether a checkpoint's quantised matrices have no block format and are dequantized even on a CPU."""
    config = quantization_config(path / "config.json") if (path / "config.json").is_file() else None
    return bool(config) and any(scheme.is_expanded_on_cpu for _, scheme in read_quantization(config or {}).schemes)


def configured_formats(spec: ModelSpec, config: Mapping[str, Any]) -> Mapping[str, StoredFormat]:
    """Return the formats of a checkpoint's matrices according to its quantization_config."""
    if not config or spec.family not in BY_NAME:
        return {}
    quantization = read_quantization(config)
    sources = sources_of(spec, BY_NAME[spec.family].hf_rules)
    found = {}
    for name, tensor in tensors_of(spec).items():
        if tensor.kind != "linear" or name.endswith(NEVER_PACKED) or name not in sources:
            continue
        scheme = quantization.scheme_of(sources[name].names[0].removesuffix(".weight"))
        if scheme is None or scheme.is_expanded:
            continue
        columns = tensor.shape[-1]
        same = max(1, (scheme.group or columns // BLOCK * BLOCK) // BLOCK)
        stored = StoredFormat(scheme.quant, same, is_ordered=scheme.is_ordered)
        is_kept = stored.quant in _FORMATS or stored.quant in TABLE_SCALE_BYTES or stored.quant == "F8"
        if stored.quant == "F8" and not _fp8_format(name, tensor.shape, stored):
            is_kept = False
        if is_kept and not (scheme.is_ordered and len(tensor.shape) == 3):  # those of experts are dequantized
            found[name] = stored
    return found
