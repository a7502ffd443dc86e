"""From a model's files to a model on its device, and the tensors of its KV pool."""

from __future__ import annotations

from pathlib import Path

import torch

from tokenmill.arch.spec import ModelSpec
from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder, rope_tables
from tokenmill.models.loading import Loader
from tokenmill.models.protocol import Model
from tokenmill.ops.cpu import instruction_set
from tokenmill.ops.cpu.decoder import NativeDecoder
from tokenmill.ops.cpu.packing import layout_digest
from tokenmill.ops.interface import OpsWanted
from tokenmill.ops.table import choose_ops
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.dummy import dummy_weights
from tokenmill.weights.locate import locate
from tokenmill.weights.packed_cache import PackedCache, is_worth_keeping, open_cache, source_of
from tokenmill.weights.source import CheckpointWeights, WeightSource, open_weights

# What each backend can make of plain weights while it loads them.
QUANTIZATIONS = {"cpu": ("none", "int8"), "triton": ("none", "fp8", "int8", "int4"), "reference": ("none",)}
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**TORCH_DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def open_source(config: EngineConfig, path: Path, spec: ModelSpec) -> WeightSource:
    if config.model.load_format == "dummy":
        if config.ops.device == "cuda":  # drawn where they are used, in the precision they are used in
            dtype = TORCH_DTYPES[config.model.dtype]
            return dummy_weights(spec, seed=config.model.seed, dtype=dtype, device=torch.device("cuda"))
        return dummy_weights(spec, seed=config.model.seed)
    require_format(config, path)
    source = open_weights(path, spec)
    source.check()
    return source


def require_format(config: EngineConfig, path: Path) -> None:
    wanted, found = config.model.load_format, locate(path).format
    if wanted not in ("auto", found):
        raise InvalidConfig(f"load_format {wanted} was asked for, but {path} holds {found}", param="load_format")


def build_model(config: EngineConfig, spec: ModelSpec, source: WeightSource) -> tuple[Model, list[str]]:
    if config.model.quantization not in QUANTIZATIONS[config.ops.backend]:
        known = ", ".join(QUANTIZATIONS[config.ops.backend])
        raise InvalidConfig(
            f"quantization {config.model.quantization!r} is not known to the {config.ops.backend} kernels",
            param="quantization",
            hint=f"they know {known}",
        )
    if config.ops.backend == "cpu":
        return native_model(config, spec, source), [native_reason()]
    wanted = ops_wanted(config, spec)
    ops, reasons = choose_ops(wanted)
    return Decoder(spec, Loader(source, ops, wanted.dtype, wanted.device), config.model.max_context), reasons


def ops_wanted(config: EngineConfig, spec: ModelSpec) -> OpsWanted:
    dtype, kv_dtype = TORCH_DTYPES[config.model.dtype], KV_DTYPES[config.cache.kv_dtype]
    return OpsWanted(
        spec,
        torch.device(config.ops.device),
        dtype,
        kv_dtype,
        config.ops.backend,
        config.model.quantization,
        config.ops.deterministic,
    )


def native_reason() -> str:
    return f"ops: native kernels ({instruction_set()})"


def native_model(config: EngineConfig, spec: ModelSpec, source: WeightSource) -> NativeDecoder:
    assert config.model.max_context is not None and config.ops.threads is not None
    tables = rope_tables(spec, config.model.max_context, torch.device("cpu"))
    kept = packed_cache(config, source)
    decoder = NativeDecoder(
        spec,
        source,
        KVLayout.from_spec(spec),
        {rope: (table.cos, table.sin) for rope, table in tables.items()},
        lambda raw: dequantize(raw, torch.float32),
        config.ops.threads,
        "int8" if config.model.quantization == "int8" else "none",
        activation_bits=config.ops.activation_bits,
        kept=kept,
    )
    kept.finish()
    return decoder


def packed_cache(config: EngineConfig, source: WeightSource) -> PackedCache:
    """Weights that were packed by an earlier start; an empty one where that is not wanted or not worth it."""
    if not config.model.packed_cache or not isinstance(source, CheckpointWeights):
        return PackedCache()
    if not is_worth_keeping(source.checkpoint.files):
        return PackedCache()
    recipe = f"{config.model.quantization} {source.recipe}"
    return open_cache(source_of(source.checkpoint.files, layout_digest(), recipe))


def kv_storage(config: EngineConfig, layout: KVLayout) -> KVStorage:
    assert config.cache.num_blocks is not None
    dtype, device = KV_DTYPES[config.cache.kv_dtype], torch.device(config.ops.device)
    return KVStorage(layout, config.cache.num_blocks, config.cache.block_size, dtype, device)
