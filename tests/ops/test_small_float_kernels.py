"""Kernels for small floats and for attention over chosen entries: compiled for Hopper they fit into its memory and
multiply on its matrix units. What they compute is tested in the interpreter and in tests/gpu."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from tests.support.compiled_launches import HOPPER, HOPPER_SHARED, KernelLaunch, launches_on_hopper
from tests.support.triton_inputs import paged_batch
from tokenmill.arch.indexer import Indexer
from tokenmill.ops.interface import ExpertsWeight, IndexInputs, LatentInputs, Norm
from tokenmill.ops.triton.attention import sparse
from tokenmill.ops.triton.attention.plan import plan_attention
from tokenmill.ops.triton.gemm.product import FP8_BLOCKS, NVFP4, Product
from tokenmill.ops.triton.launch.capabilities import named_gpu
from tokenmill.ops.triton.moe import small_floats
from tokenmill.ops.triton.moe.pairs import SortedPairs
from tokenmill.ops.triton.quant import fp4, gemm_fp4, gemm_fp8_blocks, packed_fp4
from tokenmill.ops.triton.quant.gemm_fp8_split import Fp8Rows
from tokenmill.ops.triton.quant.quantized import FP8, Fp8BlockMatrix

H200 = named_gpu("H200")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers keep what they made, for GPUs that never come."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def fp4_matrix(num_rows: int, num_columns: int) -> fp4.Fp4Matrix:
    words = torch.empty(num_rows, num_columns // 4, dtype=torch.int16)
    scales = torch.empty(num_columns // 64, num_rows, dtype=torch.int32)
    return fp4.Fp4Matrix(words, scales, torch.empty(num_rows))


def fp8_matrix(num_rows: int, num_columns: int) -> Fp8BlockMatrix:
    values = torch.empty(num_rows, num_columns, dtype=FP8)
    return Fp8BlockMatrix(values, torch.empty(num_columns // 128, num_rows))


def check(one: KernelLaunch, *, multiplies: str | None = None) -> None:
    made = one.compiled(HOPPER)
    assert made.metadata.shared <= HOPPER_SHARED, (one.name, made.metadata.shared)
    if multiplies is not None:
        assert re.search(multiplies, made.asm["ptx"]), f"{one.name}: no {multiplies}"


def test_matrices_of_fp8_blocks() -> None:
    """Few rows and many: fp8 goes into the matrix units as it is."""
    matrix, bias = fp8_matrix(6144, 4096), torch.empty(6144, dtype=BF16)
    with launches_on_hopper() as found:
        few = gemm_fp8_blocks.pick_split_config(Product(16, 6144, 4096, FP8_BLOCKS[BF16], H200))
        rows = Fp8Rows(torch.empty(16, 2, 4096, dtype=FP8), torch.empty(16, 1))
        gemm_fp8_blocks.gemm_fp8_blocks_split(rows, matrix, bias, few, BF16)
        for num_rows in (64, 300):
            many = gemm_fp8_blocks.pick_tile_config(Product(num_rows, 6144, 4096, FP8_BLOCKS[BF16], H200))
            rows = Fp8Rows(torch.empty(num_rows, 1, 4096, dtype=FP8), torch.empty(num_rows, 1))
            gemm_fp8_blocks.gemm_fp8_blocks(rows, matrix, bias, many, BF16)
    assert len(found) == 2
    for one in found.values():
        check(one, multiplies=r"wgmma\.mma_async\S*e4m3\.e4m3")


def test_matrices_of_nvfp4() -> None:
    """In the form of GPUs before Hopper too"""
    words, scales = torch.empty(4096, 3584, dtype=torch.int16), torch.empty(4096, 896, dtype=torch.uint8)
    matrix, x = packed_fp4.PackedFp4Matrix(words, scales, torch.empty(4096)), torch.empty(8, 14336, dtype=BF16)
    with launches_on_hopper(gemm_fp4, packed_fp4) as found:
        for num_rows in (8, 64):
            config = gemm_fp4.pick_fp4_config(Product(num_rows, 4096, 14336, NVFP4[BF16], H200))
            gemm_fp4.splitk_fp4_linear(x.new_empty(num_rows, 14336), matrix, None, config)
        packed_fp4.dequantize_packed_fp4(matrix, slice(0, 64), BF16)
    assert [one.name for one in found.values()] == ["_splitk_fp4", "_splitk_fp4", "_dequantize_packed_fp4"]
    for one in found.values():
        check(one, multiplies=r"mma" if one.name == "_splitk_fp4" else None)


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_experts(form: str) -> None:
    """Qwen3-30B-A3B's shapes: pairs by themselves, and sorted ones in small and large tiles"""
    experts, hidden, inter, k = 4, 2048, 768, 8
    make = fp8_matrix if form == "fp8" else fp4_matrix
    packed = ExpertsWeight(experts, (make(experts * 2 * inter, hidden), make(experts * hidden, inter)))
    with launches_on_hopper(small_floats) as found:
        x = torch.empty(2, hidden, dtype=BF16)
        ids, weights = torch.empty(2, k, dtype=torch.int64), torch.empty(2, k)
        small_floats.stream_experts(x, weights, ids, packed, "silu")
        grouped = small_floats.grouped_fp8 if form == "fp8" else small_floats.grouped_fp4
        for tokens in (2, 200):
            offsets = torch.empty(experts + 1, dtype=torch.int64)
            pairs = SortedPairs(torch.empty(tokens * k, dtype=torch.int64), offsets, torch.empty(tokens, k), experts)
            x = torch.empty(tokens, hidden, dtype=BF16)
            grouped(x, packed.packed[0], pairs, is_gathered=True, activation="silu")  # type: ignore[operator]
            inner = torch.empty(tokens * k, inter, dtype=BF16)
            grouped(inner, packed.packed[1], pairs, is_gathered=False)  # type: ignore[operator]
    names = [one.name for one in found.values() if one.name != "_quantize_rows"]
    assert names == ["_gemv_up", "_gemv_down"] + ["_grouped_fp8" if form == "fp8" else "_grouped_fp4"] * 4
    for one in found.values():
        check(one, multiplies=r"wgmma\.mma_async\S*e4m3\.e4m3" if one.name == "_grouped_fp8" else None)


def test_sparse_attention() -> None:
    """DeepSeek V3.2's shapes, rows that decode and a prompt"""
    indexer, heads, rank, rope, nope = Indexer(64, 128, 2048), 128, 512, 64, 128
    norms = Norm(torch.empty(rank), 1e-6), Norm(torch.empty(128), 1e-6, torch.empty(128), is_centred=True)
    latents = torch.empty(300, 16, rank + rope, dtype=BF16)
    matrices = torch.empty(heads, rank, nope, dtype=BF16), torch.empty(heads, 128, rank, dtype=BF16)
    with launches_on_hopper() as found:
        for lengths in ([(1, 4096)], [(600, 4096)]):
            batch = paged_batch(lengths, 16)
            plan, count = plan_attention(batch, 0, None), lengths[0][0]
            angles, slots = (torch.empty(count, rope // 2),) * 2, torch.zeros(count, dtype=torch.int64)
            index = [torch.empty(count, size, dtype=BF16) for size in (64 * 128, 128, 64)]
            kept = torch.empty(300, 16, 128, dtype=BF16)
            chosen = sparse.choose_entries(IndexInputs(*index, kept, slots, norms[1], angles, plan, indexer))
            queries, entries = (torch.empty(count, n, dtype=BF16) for n in (heads * (nope + rope), rank + rope))
            inputs = LatentInputs(queries, entries, latents, slots, norms[0], angles, *matrices, plan, 0.1, chosen)
            sparse.latent_attend(inputs)
    names = {one.name for one in found.values()}
    assert {"_score", "_choose", "_attend_chosen"} <= names
    for one in found.values():
        check(one, multiplies=r"mma" if one.name in ("_score", "_attend_chosen") else None)
