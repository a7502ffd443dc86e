"""Puts a core together: spec and weights, the model on its device, the KV pool, scheduler and runner."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch

from tokenmill.arch.cost import num_parameters
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.arch.traffic import weight_parts
from tokenmill.arch.word_forms import stored_formats
from tokenmill.config import EngineConfig, SchedulerConfig
from tokenmill.engine.core import EngineCore, Runner, no_vocabulary, nothing_left
from tokenmill.engine.resolve import DTYPE_BYTES, MachineFacts, resolve
from tokenmill.engine.speculation import LoadDraft, make_drafter, no_draft
from tokenmill.engine.status import CoreInfo
from tokenmill.errors import InvalidConfig
from tokenmill.guided.compile import Compiler
from tokenmill.guided.grammars import Grammars
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.hardware.machine import probe_machine
from tokenmill.kv.cache import KVCache
from tokenmill.kv.layout import KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder, rope_tables
from tokenmill.models.loading import Loader
from tokenmill.models.protocol import Model
from tokenmill.ops.cpu import instruction_set, is_available
from tokenmill.ops.cpu.decoder import NativeDecoder, refusal
from tokenmill.ops.cpu.packing import layout_digest
from tokenmill.ops.interface import OpsWanted
from tokenmill.ops.table import choose_ops
from tokenmill.runner.memory import NOTHING_STORED, Formats, gpu_weight_bytes
from tokenmill.runner.runner import ModelRunner
from tokenmill.sampling.sampler import Sampler
from tokenmill.scheduler import Scheduler
from tokenmill.speculate.draft_model import DraftModel
from tokenmill.store import resolve_model
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.dummy import dummy_weights
from tokenmill.weights.locate import locate, stored_bytes
from tokenmill.weights.packed_cache import PackedCache, is_worth_keeping, open_cache, source_of
from tokenmill.weights.source import CheckpointWeights, WeightSource, open_weights

log = logging.getLogger(__name__)

# What each backend can make of plain weights while it loads them.
QUANTIZATIONS = {"cpu": ("none", "int8"), "triton": ("none", "fp8", "int8", "int4"), "reference": ("none",)}
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**TORCH_DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def no_errand() -> None:
    pass


def build_core(config: EngineConfig, model_path: Path, meanwhile: Callable[[], None] = no_errand) -> EngineCore:
    """`meanwhile` is called where a start waits for compilers, if it does."""
    started = time.monotonic()
    compilers_ahead(config)
    spec = read_spec(model_path)
    layout = KVLayout.from_spec(spec)
    facts = machine_facts(config, spec, model_path)
    resolved = resolve(config, spec, layout, facts)
    settled = resolved.config
    tell_what_is_lost(config, settled, facts.native_reason)
    assert settled.ops.threads is not None and settled.model.max_context is not None
    # Native kernels bring their own threads; torch's would wait in busy loops on the same cores.
    torch.set_num_threads(1 if settled.ops.backend == "cpu" else settled.ops.threads)
    # The pool comes last: what loading needs for a moment may lie where the pool will.
    model, op_reasons = build_model(settled, spec, open_source(settled, model_path, spec))
    if settled.ops.device == "cuda":
        torch.cuda.empty_cache()
    storage = kv_storage(settled, layout)
    core = assemble(
        settled,
        model,
        storage,
        lambda: vocabulary_of(model_path, spec),
        lambda draft: build_draft(draft, settled.model.max_context, model_path, spec),
    )
    if storage.device.type == "cuda":
        run_largest_step(core.runner, settled, meanwhile)
    core.info = msgspec.structs.replace(
        core.info,
        reasons=[*resolved.reasons, *op_reasons],
        pid=os.getpid(),
        load_s=time.monotonic() - started,
    )
    return core


def compilers_ahead(config: EngineConfig) -> None:
    """Triton gets ready while the device is opened and weights are loaded."""
    is_wanted = config.ops.device != "cpu" and config.ops.backend in ("auto", "triton")
    if is_wanted and torch.cuda.is_available() and find_spec("triton") is not None:
        from tokenmill.ops.triton.ahead import begin  # imports Triton: once, in one thread

        begin()


def tell_what_is_lost(asked: EngineConfig, settled: EngineConfig, reason: str | None) -> None:
    """Torch's reference serves everything, slowly: nobody should find that out by waiting."""
    if settled.ops.backend == "reference" and asked.ops.backend == "auto":
        log.warning("%s; computing with torch instead, many times slower and with more memory", reason)


def run_largest_step(runner: Any, config: EngineConfig, meanwhile: Callable[[], None]) -> None:
    """What does not fit must fail now, with a word of advice, and not under load."""
    try:
        runner.run_largest_step(config.scheduler.num_tokens, meanwhile)
    except torch.cuda.OutOfMemoryError as error:
        raise InvalidConfig(
            "the largest step does not fit beside the weights and the KV cache",
            param="memory_fraction",
            hint="lower memory_fraction, max_running or token_budget",
        ) from error


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


def foreseen(config: EngineConfig, model_path: Path) -> list[str]:
    """What would be chosen for a model here, and why, without loading it."""
    spec = read_spec(model_path)
    resolved = resolve(config, spec, KVLayout.from_spec(spec), machine_facts(config, spec, model_path))
    if resolved.config.ops.backend == "cpu":
        return [*resolved.reasons, native_reason()]
    return [*resolved.reasons, *choose_ops(ops_wanted(resolved.config, spec))[1]]


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


def native_refusal(config: EngineConfig, spec: ModelSpec) -> str | None:
    """Why the native kernels can't compute this model here; None when they can."""
    available, reason = is_available()
    if not available:
        return reason
    if config.model.dtype not in ("auto", "float32"):
        return f"the native kernels compute in float32, not {config.model.dtype}"
    kv_dtype = "float16" if config.cache.kv_dtype == "auto" else config.cache.kv_dtype
    return refusal(spec, config.cache.block_size, KV_DTYPES[kv_dtype])


def kv_storage(config: EngineConfig, layout: KVLayout) -> KVStorage:
    assert config.cache.num_blocks is not None
    dtype, device = KV_DTYPES[config.cache.kv_dtype], torch.device(config.ops.device)
    return KVStorage(layout, config.cache.num_blocks, config.cache.block_size, dtype, device)


def assemble(
    config: EngineConfig,
    model: Model,
    storage: KVStorage,
    load_vocabulary: Callable[[], Vocabulary] = no_vocabulary,
    load_draft: LoadDraft = no_draft,
) -> EngineCore:
    """Scheduler and runner over a model that is already there (a real one or a scripted one).

    `load_vocabulary` is called when the first request with a grammar arrives: the core needs text for nothing else.
    `load_draft` is called where the config asks for a draft model.
    """
    assert config.model.max_context is not None
    max_rows = config.scheduler.num_rows
    cache = KVCache(
        windows=storage.layout.windows,
        num_blocks=storage.num_blocks,
        block_size=storage.block_size,
        prefix_caching=config.cache.prefix_caching,
    )
    is_cuda = storage.device.type == "cuda"
    grammars = Grammars(Compiler(load_vocabulary), max_rows, model.vocab_size)
    scheduler = Scheduler(
        config=config.scheduler,
        cache=cache,
        max_rows=max_rows,
        clock=time.monotonic,
        lookahead_tokens=1 if is_cuda else 0,
        drafter=make_drafter(config, grammars.num_allowed, load_draft),
    )
    sampler = Sampler(model.vocab_size, max_rows, storage.device)
    runner = make_runner(model, storage, sampler, max_rows, config.model.max_context)
    info = CoreInfo(
        max_context=config.model.max_context,
        num_blocks=storage.num_blocks,
        block_size=storage.block_size,
        max_running=max_rows,
    )
    prepare_next = getattr(runner, "prepare_next", nothing_left)
    return EngineCore(scheduler, runner, info, grammars=grammars, prepare_next=prepare_next)


def build_draft(config: EngineConfig, target_context: int | None, target_path: Path, target: ModelSpec) -> DraftModel:
    """A second model with a runner and a cache of its own, in the memory that the first one left."""
    assert target_context is not None
    path = resolve_model(config.model.model).path
    spec = read_spec(path)
    require_same_vocabulary(path, spec, target_path, target)
    config = replace(config, model=replace(config.model, max_context=min(target_context, spec.max_context)))
    layout = KVLayout.from_spec(spec)
    settled = resolve(config, spec, layout, machine_facts(config, spec, path)).config
    assert settled.model.max_context is not None and settled.cache.num_blocks is not None
    storage = kv_storage(settled, layout)
    model, _ = build_model(settled, spec, open_source(settled, path, spec))
    return draft_model(model, storage, settled.scheduler, settled.model.max_context)


def draft_model(model: Model, storage: KVStorage, scheduler: SchedulerConfig, max_context: int) -> DraftModel:
    max_rows = scheduler.num_rows
    runner = ModelRunner(model, storage, Sampler(model.vocab_size, max_rows, storage.device), max_rows, max_context)
    cache = KVCache(windows=storage.layout.windows, num_blocks=storage.num_blocks, block_size=storage.block_size)
    return DraftModel(runner, cache, max_context, scheduler.num_tokens)


def require_same_vocabulary(path: Path, spec: ModelSpec, target_path: Path, target: ModelSpec) -> None:
    """Guesses are token ids: the same id must be the same text in both models."""
    from tokenmill.engine.front import tokenizer_of

    own, other = tokenizer_of(path), tokenizer_of(target_path)
    problem = None
    if spec.vocab_size != target.vocab_size:
        problem = f"it has {spec.vocab_size} tokens, the model {target.vocab_size}"
    elif own is not None and other is not None:
        differing = next((i for i in range(spec.vocab_size) if own.token_bytes(i) != other.token_bytes(i)), None)
        problem = None if differing is None else f"token {differing} is another one"
    if problem is not None:
        raise InvalidConfig(
            f"{path.name} can't guess for {target_path.name}: {problem}",
            param="speculate",
            hint="a draft model needs the same vocabulary, as smaller models of one family have",
        )


def vocabulary_of(model_path: Path, spec: ModelSpec) -> Vocabulary:
    # Text is needed for grammars only, and a start is to be quick.
    from tokenmill.engine.front import eos_ids, tokenizer_of

    tokenizer = tokenizer_of(model_path)
    if tokenizer is None:
        return no_vocabulary()
    return Vocabulary(tokenizer, spec.vocab_size, eos_ids(spec, tokenizer))


def make_runner(model: Model, storage: KVStorage, sampler: Sampler, max_rows: int, max_context: int) -> Runner:
    if storage.device.type != "cuda":
        return ModelRunner(model, storage, sampler, max_rows, max_context)
    from tokenmill.runner.cuda_runner import CudaRunner  # needs Triton, which a machine without a GPU may not have

    return CudaRunner(model, storage, sampler, max_rows, max_context)


def machine_facts(config: EngineConfig, spec: ModelSpec, path: Path) -> MachineFacts:
    machine = probe_machine()
    has_cuda = config.ops.device != "cpu" and torch.cuda.is_available()
    native_reason = native_refusal(config, spec)
    is_native = not has_cuda and native_reason is None and config.ops.backend in ("auto", "cpu")
    return MachineFacts(
        cores=machine.cpu.usable_cores,
        available_bytes=torch.cuda.mem_get_info()[0] if has_cuda else machine.memory.available_bytes,
        weight_bytes=expected_weight_bytes(config, spec, path, has_cuda=has_cuda, is_native=is_native),
        has_cuda=has_cuda,
        native_reason=native_reason,
        has_words=has_cuda and has_words(config, spec, path),
    )


def kept_formats(config: EngineConfig, spec: ModelSpec, path: Path) -> Formats:
    """What of a file a GPU computes with as it is: nothing in plain float32, nor where sums have one order only."""
    ops, model = config.ops, config.model
    is_expanded = ops.deterministic or ops.backend == "reference" or model.load_format == "dummy"
    if is_expanded or (model.dtype == "float32" and model.quantization == "none"):
        return NOTHING_STORED
    return stored_formats(path, spec)


def has_words(config: EngineConfig, spec: ModelSpec, path: Path) -> bool:
    return config.model.quantization in ("int4", "int8") or bool(kept_formats(config, spec, path))


def expected_weight_bytes(config: EngineConfig, spec: ModelSpec, path: Path, *, has_cuda: bool, is_native: bool) -> int:
    """Native kernels keep a file's precision, or round to blocks of 8 bits, Triton's have words of 4 and 8 bits; the
    reference expands everything to the compute dtype."""
    if is_native:
        stored = num_parameters(spec) * 4 if config.model.load_format == "dummy" else stored_bytes(path)
        rounded = weight_parts(spec, "Q8_0", vector_dtype="float32").total
        return min(stored, rounded) if config.model.quantization == "int8" else stored
    value_bytes = DTYPE_BYTES.get(config.model.dtype, 2 if has_cuda else 4)
    if has_cuda:
        return gpu_weight_bytes(spec, value_bytes, config.model.quantization, kept_formats(config, spec, path))
    return num_parameters(spec) * value_bytes
