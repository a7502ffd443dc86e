"""A KV cache in one byte a number: how far attention over it is from attention over exact keys and values."""

from __future__ import annotations

import pytest
import torch

from tokenmill.arch.cache_parts import CacheField
from tokenmill.kv.layout import CacheGroup, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.ops.batch import ForwardBatch, GroupTables
from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.reference import REFERENCE_OPS as OPS
from tokenmill.ops.reference.kv_rounding import LARGEST, rounded


def layout_of(dtype: torch.dtype) -> KVLayout:
    fields = tuple(CacheField(name, (2, 64), NAMES.get(dtype, "float32")) for name in ("keys", "values"))
    return KVLayout((CacheGroup(fields, None, (0,)),))


NAMES = {torch.float32: "float32", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
# Relative error of the mixed values, stated in the README: random keys and values, 300 tokens of context.
STATED_ERROR = {torch.int8: 0.01, torch.float8_e4m3fn: 0.04}


def storage_of(dtype: torch.dtype) -> KVStorage:
    return KVStorage(layout_of(dtype), num_blocks=24, block_size=16, device=torch.device("cpu"))


def attended(dtype: torch.dtype) -> torch.Tensor:
    """Queries at the end of a context of 300 tokens."""
    torch.manual_seed(0)
    keys, values, queries = torch.randn(300, 2, 64), torch.randn(300, 2, 64), torch.randn(7, 4, 64)
    cache = storage_of(dtype).layer(0)
    table = torch.randperm(23)[:19].add(1).int().unsqueeze(0)
    positions = torch.arange(300)
    OPS.write_kv(cache, keys, values, table[0].long()[positions // 16] * 16 + positions % 16)
    none = torch.empty(0, dtype=torch.int64)
    batch = ForwardBatch(
        none, none, torch.tensor([0, 7]).int(), torch.tensor([300]).int(), (GroupTables(table, none),), none, 16, 7, 300
    )
    return OPS.attention(queries, cache, OPS.plan_attention(batch, 0, None), AttentionArgs(0.125))


@pytest.mark.parametrize("dtype", LARGEST)
def test_attention_stays_within_the_stated_error(dtype: torch.dtype) -> None:
    exact, found = attended(torch.float32), attended(dtype)
    error = float((found - exact).norm() / exact.norm())
    assert 0 < error < STATED_ERROR[dtype]


@pytest.mark.parametrize("dtype", LARGEST)
def test_each_vector_has_its_own_scale(dtype: torch.dtype) -> None:
    vectors = torch.randn(5, 64) * torch.tensor([1e-6, 1e-2, 1.0, 1e2, 1e5]).unsqueeze(1)
    numbers, scales = rounded(vectors, dtype)
    error = (numbers.float() * scales.unsqueeze(1) - vectors).abs().amax(1) / vectors.abs().amax(1)
    assert bool((error < {torch.int8: 1 / 253, torch.float8_e4m3fn: 1 / 16}[dtype]).all())


@pytest.mark.parametrize("dtype", LARGEST)
def test_zeros_and_broken_vectors(dtype: torch.dtype) -> None:
    vectors = torch.stack([torch.zeros(8), torch.full((8,), float("nan"))])
    numbers, scales = rounded(vectors, dtype)
    values = numbers.float() * scales.unsqueeze(1)
    assert values[0].eq(0).all() and values[1].isnan().all()


@pytest.mark.parametrize("dtype", NAMES)
def test_size_and_copies(dtype: torch.dtype) -> None:
    storage = storage_of(dtype)
    assert storage.num_bytes == 24 * layout_of(dtype).block_bytes(16)
    layer = storage.layer(0)
    keys = torch.randn(1, 2, 64)
    OPS.write_kv(layer, keys, keys, torch.tensor([3 * 16 + 5]))
    storage.copy_blocks([(3, 7)])
    parts = [part for part in vars(layer).values() if part is not None]
    assert len(parts) == (2 if dtype == torch.float32 else 4)
    for part in parts:
        assert torch.equal(part[7].float(), part[3].float()) and part[7].float().any()


def test_a_float_cache_has_no_scales() -> None:
    layer = storage_of(torch.float32).layer(0)
    assert layer.key_scales is None and layer.value_scales is None
