"""Attention over a window and compressed entries, and mixtures of streams, in the dimensions of DeepSeek V4 on a real
GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.large_model import relative_error
from tests.support.triton_inputs import paged_batch
from tokenmill.arch.compressed import Compression
from tokenmill.arch.indexer import Indexer
from tokenmill.arch.spec import RopeSpec, WindowedMqa
from tokenmill.arch.streams import HyperConnections
from tokenmill.models.rope import make_rope_table
from tokenmill.ops.batch import ForwardBatch, GroupTables
from tokenmill.ops.compressed import CachedField, EntryWeights, WindowedInputs, WindowedWeights
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.ops.streams import Addend, JoinedStreams, StreamConnection

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
BLOCK, HEADS, DIM, HALF = 128, 64, 512, 32
SPARSE, HEAVY = Compression(4, overlaps=True, indexer=Indexer(64, 128, 512)), Compression(128)
DECODE, MIXED = [(1, 3000), (1, 40), (1, 700), (1, 2048)], [(1, 2500), (300, 300), (70, 1100)]


def batch_of(lengths: list[tuple[int, int]]) -> tuple[ForwardBatch, GroupTables]:
    batch = paged_batch(lengths, BLOCK)
    tables, every = batch.groups[0].block_tables, torch.arange(max(context for _, context in lengths))
    places = tables.long()[:, every // BLOCK] * BLOCK + every % BLOCK
    slots = torch.cat([places[row, end - count : end] for row, (count, end) in enumerate(lengths)])
    positions = torch.cat([torch.arange(end - count, end) for count, end in lengths])
    batch = replace(
        batch,
        positions=positions.cuda(),
        query_starts=batch.query_starts.cuda(),
        context_lens=batch.context_lens.cuda(),
    )
    return batch, GroupTables(tables.cuda(), slots.cuda())


def inputs_of(lengths: list[tuple[int, int]], compression: Compression | None, dtype: torch.dtype) -> WindowedInputs:
    torch.manual_seed(0)
    batch, tables = batch_of(lengths)
    spec = WindowedMqa(HEADS, DIM, 1024, 128, DIM**-0.5, RopeSpec(1e4, 2 * HALF), 8, 1024, compression=compression)
    count, num_blocks = len(batch.positions), 1 + tables.block_tables.numel()

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    def fields(dim: int) -> tuple[CachedField, CachedField]:
        assert compression is not None
        made = drawn(num_blocks, BLOCK, compression.inputs_size(dim)), drawn(num_blocks, BLOCK, dim // compression.rate)
        return CachedField(made[0], tables), CachedField(made[1], tables)

    def weights(dim: int) -> EntryWeights:
        assert compression is not None
        width = compression.num_series * dim
        return EntryWeights(torch.randn(compression.rate, width).cuda(), (torch.rand(dim) + 0.5).cuda())

    indexer = compression and compression.indexer
    return WindowedInputs(
        batch, drawn(count, HEADS * DIM), drawn(count, DIM + 8)[:, :DIM],
        make_rope_table(spec.rope, 4096, torch.device("cuda")).cos_sin,
        CachedField(drawn(num_blocks, BLOCK, DIM), tables),
        drawn(count, compression.inputs_size(DIM)) if compression else None, fields(DIM) if compression else None,
        drawn(count, compression.inputs_size(128)) if compression and indexer else None,
        fields(128) if indexer else None, drawn(count, indexer.q_size) if indexer else None,
        drawn(count, indexer.num_heads) if indexer else None,
        WindowedWeights(
            (torch.rand(DIM) + 0.5).cuda(), torch.randn(HEADS).cuda(), weights(DIM) if compression else None,
            weights(128) if indexer else None,
        ),
        spec,
    )  # fmt: skip


def copied(inputs: WindowedInputs, dtype: torch.dtype) -> WindowedInputs:
    """With caches of its own; everything that is computed with in another type"""

    def field(kept: CachedField) -> CachedField:
        return CachedField(kept.values.to(dtype, copy=True), kept.tables)

    def pair(kept: tuple[CachedField, CachedField] | None) -> tuple[CachedField, CachedField] | None:
        return None if kept is None else (field(kept[0]), field(kept[1]))

    def wide(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.to(dtype)

    return inputs._replace(
        queries=inputs.queries.to(dtype), keys=inputs.keys.to(dtype), window=field(inputs.window),
        entry_inputs=wide(inputs.entry_inputs), entry_fields=pair(inputs.entry_fields),
        index_inputs=wide(inputs.index_inputs), index_fields=pair(inputs.index_fields),
        index_queries=wide(inputs.index_queries), index_weights=wide(inputs.index_weights),
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("compression", [None, HEAVY, SPARSE], ids=["window", "heavy", "sparse"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["fastest", "deterministic"])
def test_entries_and_windows(
    lengths: list[tuple[int, int]], compression: Compression | None, deterministic: bool
) -> None:
    """In bfloat16 beside the reference in float32; of an index, entries that score nearly alike may be taken for each
    other, which few queries notice much."""
    from tokenmill.ops.triton.build import build_ops

    inputs = inputs_of(lengths, compression, torch.bfloat16)
    exact = copied(inputs, torch.float32)
    found = build_ops(deterministic=deterministic).windowed_attend(inputs).float()
    wanted = REFERENCE_OPS.windowed_attend(exact)
    errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(errors.median()) < 0.01 and (compression is SPARSE or float(errors.max()) < 0.02), errors.max()
    if inputs.entry_fields is not None and exact.entry_fields is not None:
        assert relative_error(inputs.entry_fields[1].values, exact.entry_fields[1].values) < 0.01


@pytest.mark.parametrize("num_tokens", [1, 40, 700])
def test_mixtures_of_streams(num_tokens: int) -> None:
    from tokenmill.ops.triton.build import build_ops

    torch.manual_seed(0)
    spec, ops = HyperConnections(4, 20), build_ops()
    connection = StreamConnection(
        spec, torch.randn(24, 4 * 4096).cuda() * 0.01, torch.randn(24).cuda(), torch.rand(3).cuda() + 0.5
    )
    streams, result = (
        torch.randn(num_tokens, 4, 4096).cuda().bfloat16(),
        torch.randn(num_tokens, 4096).cuda().bfloat16(),
    )
    mixed = torch.rand(num_tokens, 4, 4).cuda()
    joined = JoinedStreams(streams, Addend(result, torch.rand(num_tokens, 4).cuda(), mixed))
    found, wanted = ops.hyper.read(joined, connection), REFERENCE_OPS.hyper.read(joined, connection)
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative_error(ours, theirs) < 0.01
    assert relative_error(found.mixed, wanted.mixed) < 1e-4


@pytest.mark.parametrize("num_tokens", [1, 20, 100])
def test_products_of_groups(num_tokens: int) -> None:
    from tokenmill.ops.triton.build import build_ops

    torch.manual_seed(0)
    x, matrices = torch.randn(num_tokens, 8, 4096).cuda().bfloat16(), torch.randn(8, 1024, 4096).cuda().bfloat16()
    wanted = REFERENCE_OPS.multiply_groups(x.float(), matrices.float())
    for deterministic in (False, True):
        assert relative_error(build_ops(deterministic=deterministic).multiply_groups(x, matrices), wanted) < 0.01
