"""Loading a model's files onto its device, and allocating its KV pool.

The backend's row (`backends.py`) selects which of two models is built: `Decoder`, which calls a table of ops layer by
layer, or `NativeDecoder`, whose step is one call of the compiled CPU kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tokenmill.arch.mtp import mtp_head
from tokenmill.arch.packed_formats import dummy_formats, stored_formats
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import EngineConfig
from tokenmill.engine.adapter_room import named_expert_rank
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.pool_memory import PoolMemory
from tokenmill.kv.storage import DTYPES, KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.forward_context import PositionTables
from tokenmill.models.linear import AdapterSlots, Loader
from tokenmill.models.mtp_head import MtpHead
from tokenmill.models.protocol import Model, StagedModel
from tokenmill.ops.cpu.decoder import NativeDecoder
from tokenmill.ops.cpu.packing import layout_digest
from tokenmill.ops.interface import Ops
from tokenmill.parallel.group import Shard
from tokenmill.parallel.shared import SharedGroup
from tokenmill.runner.memory import cells_for_states
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.dummy import dummy_weights
from tokenmill.weights.locate import locate
from tokenmill.weights.packed_cache import PackedCache, is_worth_keeping, open_cache, source_of
from tokenmill.weights.rank_weights import RankWeights
from tokenmill.weights.source import CheckpointWeights, WeightSource, open_mtp_head, open_weights


def open_source(config: EngineConfig, path: Path, spec: ModelSpec) -> WeightSource:
    """Open the model's weights: those of its files, checked for completeness, or random ones."""
    if config.model.load_format == "dummy":  # generated on the device, in the compute precision
        dtype, device = DTYPES[config.model.dtype], torch.device(config.ops.device)
        stored = dummy_formats(stored_formats(path, spec))
        return dummy_weights(spec, seed=config.model.seed, dtype=dtype, device=device, stored=stored)
    expected, found = config.model.load_format, locate(path).format
    if expected not in ("auto", found):
        raise InvalidConfig(f"load_format is {expected}, but {path} is {found}", param="load_format")
    source = open_weights(path, spec)
    source.check()
    return source


def build_decoder(
    config: EngineConfig, spec: ModelSpec, source: WeightSource, ops: Ops, shard: Shard | None = None
) -> Decoder:
    """Build a model that computes layer by layer with a table of ops; `shard`: this rank's part of it."""
    dtype, device = DTYPES[config.model.dtype], torch.device(config.ops.device)
    model = config.model
    slots = AdapterSlots(model.adapter_slots or 0, model.max_adapter_rank or 0, named_expert_rank(model, spec))
    return Decoder(spec, Loader(source, ops, dtype, device, slots, shard), config.model.max_context)


def build_native_decoder(
    config: EngineConfig, spec: ModelSpec, source: WeightSource, shard: Shard | None = None
) -> NativeDecoder:
    """Build a model whose step is one call of the compiled CPU kernels; `shard`: this rank's part of it."""
    kept = packed_cache(config, source)
    decoder = _native_decoder(config, spec, source, kept, shard)
    kept.finish()
    return decoder


def _native_decoder(
    config: EngineConfig,
    spec: ModelSpec,
    source: WeightSource,
    kept: PackedCache | None = None,
    shard: Shard | None = None,
    ends: NativeDecoder | None = None,
) -> NativeDecoder:
    assert config.model.max_context is not None and config.ops.threads is not None
    tables = PositionTables.of(spec, config.model.max_context, torch.device("cpu")).ropes
    return NativeDecoder(
        spec,
        source,
        {rope: (table.cos, table.sin) for rope, table in tables.items()},
        lambda raw: dequantize(raw, torch.float32),
        config.ops.threads,
        "int8" if config.model.quantization == "int8" else "none",
        activation_bits=config.ops.activation_bits,
        kept=kept,
        num_adapter_slots=0 if ends is not None else config.model.adapter_slots or 0,
        shard=shard,
        window=shared_window(shard),
        layers=None if shard is None else shard.layers,
        ends=ends,
    )


def build_mtp_head(config: EngineConfig, spec: ModelSpec, path: Path, model: Model) -> MtpHead:
    """Build the model's head that predicts one more token; it uses the model's embedding and output matrix."""
    source, head = open_mtp_head(path, spec), mtp_head(spec)
    layer: StagedModel
    if isinstance(model, Decoder):
        dtype, device = DTYPES[config.model.dtype], torch.device(config.ops.device)
        layer = Decoder(head, Loader(source, model.ops, dtype, device), config.model.max_context, ends=model)
    else:
        assert isinstance(model, NativeDecoder), "see `resolve_speculation`"
        layer = _native_decoder(config, head, source, ends=model)
    return MtpHead(head, source, layer)


def shared_window(shard: Shard | None) -> Any:
    """Return the memory window through which native kernels of several ranks exchange; None for one rank."""
    if shard is None or shard.group.size == 1:
        return None
    assert isinstance(shard.group, SharedGroup), "see `resolve_parallel`"
    return shard.group.window


def packed_cache(config: EngineConfig, source: WeightSource) -> PackedCache:
    """Open the cache of weights packed by an earlier start; an empty one if it is turned off or not worthwhile."""
    rows = source.recipe if isinstance(source, RankWeights) else ""
    source = source.source if isinstance(source, RankWeights) else source
    if not config.model.packed_cache or not isinstance(source, CheckpointWeights):
        return PackedCache()
    if not is_worth_keeping(source.checkpoint.files):
        return PackedCache()
    recipe = f"{config.model.quantization} {source.recipe}{rows}"
    return open_cache(source_of(source.checkpoint.files, layout_digest(), recipe))


def kv_storage(
    config: EngineConfig, spec: ModelSpec, layers: range | None = None, memory: PoolMemory | None = None
) -> KVStorage:
    """Allocate the KV pool of a resolved config. `layers`: only these layers, if other ranks compute the rest.
    `memory`: the memory to use, if another process maps it too."""
    cache, device = config.cache, torch.device(config.ops.device)
    assert cache.num_blocks is not None
    layout = KVLayout.from_spec(spec, CacheDtypes(cache.kv_dtype, config.model.dtype))
    if layers is not None:
        layout = layout.of_layers(layers)
    num_states = cache.num_states or 0
    num_cells = cells_for_states(layout, num_states, cache.tokens_per_block, config.scheduler.num_rows)
    return KVStorage(
        layout,
        cache.num_blocks,
        cache.tokens_per_block,
        device,
        num_cells=num_cells,
        num_states=num_states,
        memory=memory,
    )


def one_block_storage(config: EngineConfig, spec: ModelSpec) -> KVStorage:
    """Allocate a pool of the whole model with only the null block: it defines the layout of a block."""
    layout = KVLayout.from_spec(spec, CacheDtypes(config.cache.kv_dtype, config.model.dtype))
    number = int(layout.is_recurrent)
    device = torch.device(config.ops.device)
    return KVStorage(layout, 1, config.cache.tokens_per_block, device, num_cells=number, num_states=number)
