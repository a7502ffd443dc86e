"""KV blocks of a model on several ranks, for those who keep or fetch whole blocks: which ranks a core can reach the
pools of, and what each has of a block."""

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
    """Return why blocks of this model's ranks can't be kept or fetched as a whole; None when they can."""
    if device != "cpu":
        return "its ranks are on GPUs"
    if parallel.dp_attention:
        return "its ranks keep the contexts of some sequences each"
    if parallel.stages_at is not None:
        return "its stages are on other machines"
    if parallel.pp > 1:
        layout = KVLayout.from_spec(spec)
        if len(layout.groups) > 1 or not layout.is_uniform:
            return "its stages keep several kinds of blocks"
    return None


def ranked_records(
    config: EngineConfig, spec: ModelSpec, own: KVStorage, pools: Sequence[int]
) -> Callable[[], RankedRecords]:
    """Return what makes the records of all ranks' pools. `own`: rank 0's; `pools`: descriptors of the files that those
    of the other ranks lie in."""
    mesh = Mesh(config.parallel.tp, config.parallel.pp)
    stages = split_layers(spec, mesh.pp)
    heads: Sequence[tuple[int, int]] = [(0, 0)] * mesh.tp  # each rank has all, unless attention is cut by heads
    if cuts_heads(spec, mesh.tp) and (mixer := next(iter(spec.attentions), None)) is not None:
        found = split_heads(mixer.num_heads, mixer.num_kv_heads, mesh.tp)
        assert found is not None, "see `cuts_heads`"
        heads = found[1].spans
    parts = []
    for rank in range(mesh.size):
        place, layers = rank % mesh.tp, stages[mesh.stage(rank)]
        storage = own
        if rank:
            memory = PoolMemory(pools[rank - 1], is_owner=False)
            storage = kv_storage(config, cut_spec(spec, mesh.tp, place), layers, memory)
        parts.append(RankBlocks(storage, layers, heads[place]))
    whole = one_block_storage(config, spec)
    return lambda: RankedRecords(whole, parts)
