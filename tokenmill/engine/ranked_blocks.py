"""KV blocks of a model on several ranks, for tiers and transfers, which handle whole blocks: whether the core can
access the pools of all ranks, and the part of a block that each rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenmill.arch.spec import ModelSpec
from tokenmill.config import EngineConfig, ParallelConfig
from tokenmill.engine.model import kv_storage, one_block_storage
from tokenmill.kv.layout import KVLayout
from tokenmill.kv.pool_memory import PoolMemory
from tokenmill.kv.ranked_records import RankBlocks, RankedRecords
from tokenmill.kv.storage import KVStorage
from tokenmill.parallel.cuts import cut_spec, cuts_heads, split_heads
from tokenmill.parallel.stages import Mesh, split_layers


def ranked_block_limits(parallel: ParallelConfig, spec: ModelSpec, device: str) -> str | None:
    """Return why blocks of this model's ranks can't be stored or fetched as a whole; None if they can."""
    if device != "cpu":
        return "its ranks are on GPUs"
    if parallel.dp_attention:
        return "each of its ranks has the contexts of only some sequences"
    if parallel.stages_at is not None:
        return "its pipeline stages are on other machines"
    if parallel.pp > 1:
        layout = KVLayout.from_spec(spec)
        if len(layout.groups) > 1 or not layout.is_uniform:
            return "its pipeline stages have several kinds of blocks"
    return None


def ranked_records(
    config: EngineConfig, spec: ModelSpec, own: KVStorage, pools: Sequence[int]
) -> Callable[[], RankedRecords]:
    """Return the factory of the accessor to all ranks' pools. `own`: rank 0's pool; `pools`: descriptors of the files
    with the pools of the other ranks."""
    mesh = Mesh(config.parallel.tp, config.parallel.pp)
    stages = split_layers(spec, mesh.pp)
    heads: Sequence[tuple[int, int]] = [(0, 0)] * mesh.tp  # each rank has all heads, unless attention is split by heads
    if cuts_heads(spec, mesh.tp) and (mixer := next(iter(spec.attentions), None)) is not None:
        found = split_heads(mixer.num_heads, mixer.num_kv_heads, mesh.tp)
        assert found is not None, "see `cuts_heads`"
        heads = found[1].spans
    parts = []
    for rank in range(mesh.size):
        stage_rank, layers = rank % mesh.tp, stages[mesh.stage(rank)]
        storage = own
        if rank:
            memory = PoolMemory(pools[rank - 1], is_owner=False)
            storage = kv_storage(config, cut_spec(spec, mesh.tp, stage_rank), layers, memory)
        parts.append(RankBlocks(storage, layers, heads[stage_rank]))
    whole = one_block_storage(config, spec)
    return lambda: RankedRecords(whole, parts)
