"""Random inputs for Triton kernels, and the comparison with the reference ops."""

from __future__ import annotations

import ctypes
import mmap
import random
from dataclasses import replace

import msgspec
import torch

from tokenmill.arch.block_formats import OTHER_TYPES
from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME
from tokenmill.arch.packed_formats import StoredFormat, packed_int_format
from tokenmill.ops.batch import ForwardBatch, GroupTables, LayerCache
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference.kv_rounding import rounded
from tokenmill.ops.triton.launch.capabilities import Capabilities, capabilities_of
from tokenmill.ops.triton.quant import quantized
from tokenmill.weights.dummy import random_blocks
from tokenmill.weights.scaled_blocks import Groups, integer_blocks


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Require the same shape and type, and a relative error of the whole tensor below the tolerance."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, (found.shape, expected.shape, found.dtype)
    difference = float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))
    assert difference < tolerance, difference


def paged_batch(lengths: list[tuple[int, int]], block: int) -> ForwardBatch:
    """Build a batch of rows with (queries, context) tokens each, on scattered blocks."""
    width = max(-(-context // block) for _, context in lengths)
    ids = list(range(1, 1 + width * len(lengths)))
    random.Random(0).shuffle(ids)
    tables = torch.tensor(ids, dtype=torch.int32).view(len(lengths), width)
    counts = torch.tensor([queries for queries, _ in lengths])
    none = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        token_ids=none,
        positions=none,
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int(),
        context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32),
        groups=(GroupTables(tables, none),),
        logit_rows=none,
        block_size=block,
        max_query_len=int(counts.max()),
        max_context_len=max(context for _, context in lengths),
        num_single=next((i for i, (queries, _) in enumerate(lengths) if queries > 1), len(lengths)),
    )


def random_cache(num_blocks: int, kv_heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    """Fill blocks of 16 tokens with random keys and values; one-byte types come with a scale for each vector."""
    vectors = torch.randn(2, num_blocks, kv_heads, 16, dim)
    if dtype == torch.float32:
        return LayerCache(*vectors)
    numbers, scales = rounded(vectors, dtype)
    return LayerCache(*numbers, *scales)


def random_raw(quant: str, num_in: int, blocks_per_scale: int, num_out: int = 24) -> RawTensor:
    """Draw a random quantised matrix in which every `blocks_per_scale` blocks share their scales."""
    blocks = random_blocks((num_out, num_in), quant, torch.Generator().manual_seed(1))
    if quant in ("Q4_0", "Q4_1"):
        each = blocks.view(-1, blocks_per_scale, GGML_TYPE_BY_NAME[quant].block_bytes)
        drawn = (torch.rand(len(each), 1, 1) * 0.01 + 0.001) * torch.tensor([1.0, -6.5])
        num_bytes = 2 if quant == "Q4_0" else 4
        each[:, :, :num_bytes] = drawn.half().view(torch.uint8)[:, :, :num_bytes]
    return RawTensor("a.weight", (num_out, num_in), blocks, quant, blocks_per_scale)


def other_raw(quant: str, num_in: int, num_out: int = 24) -> RawTensor:
    """Make a random matrix in a format of another vendor, with equal scales for 128 columns if the format allows it."""
    drawn = torch.Generator().manual_seed(2)
    if quant in ("G4", "G8"):
        bits, shape = int(quant[1]), (num_out, num_in // 128)
        codes = torch.randint(0, 1 << bits, (num_out, num_in), generator=drawn, dtype=torch.uint8)
        zeros = torch.randint(0, 1 << bits, shape, generator=drawn)
        scales = torch.rand(shape, generator=drawn) * 0.01 + 0.001
        return integer_blocks("a.weight", Groups(codes, bits, zeros, scales))
    size = OTHER_TYPES[quant].block_bytes
    blocks = torch.randint(0, 256, (num_out, num_in // 32, size), generator=drawn, dtype=torch.uint8)
    blocks[:, :, :4] = torch.full((1, 1, 1), 0.01).view(torch.uint8)
    if quant == "F8":  # the highest codes are NaN
        blocks[:, :, 4:] &= 0xBF
    if quant in ("NV4", "NV4D"):
        blocks[:, :, 4:6] = torch.randint(40, 80, (num_out, num_in // 32, 2), generator=drawn, dtype=torch.uint8)
    if quant == "NV4D":
        blocks[:, :, :4] = torch.full((1, 1, 1), 100.0).view(torch.uint8)
    return RawTensor("a.weight", (num_out, num_in), blocks.flatten(1), quant)


def before_unreadable_page(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor in front of a protected page: reading past its last byte ends the process."""
    size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    region = mmap.mmap(-1, size + mmap.PAGESIZE)
    page = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(region)) + size)
    assert ctypes.CDLL(None).mprotect(page, mmap.PAGESIZE, 0) == 0
    copy = torch.frombuffer(region, dtype=tensor.dtype, count=tensor.numel(), offset=size - tensor.nbytes)
    return copy.view(tensor.shape).copy_(tensor)


def pack_as_file(quant: str, num_out: int, num_in: int, blocks_per_scale: int = 1) -> quantized.PackedIntMatrix:
    """Make a random matrix [num_out, num_in] quantised as in a file, and packed without rounding it again."""
    raw = random_raw(quant, num_in, blocks_per_scale, num_out)
    form = packed_int_format(raw.name, raw.shape, StoredFormat(quant, blocks_per_scale))
    assert form is not None
    return quantized.packed_from_blocks(raw.data, quant, form)


def gpu_with(**numbers: int) -> Capabilities:
    """Replace figures of the GPU that kernels are selected for in the interpreter."""
    found = capabilities_of(torch.device("cpu"))
    return replace(found, tuning=msgspec.structs.replace(found.tuning, **numbers))
