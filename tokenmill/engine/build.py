"""Assembling a core: the model on its device, the KV pool, scheduler and runner."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import EngineConfig, SchedulerConfig
from tokenmill.config.adapters import named_adapters
from tokenmill.config.promises import read_service_level
from tokenmill.engine.adapters import AdapterStore
from tokenmill.engine.backends import find_device
from tokenmill.engine.core import EngineCore, Runner, no_vocabulary
from tokenmill.engine.kv_tiers import BlocksDigest, MakeRecords, block_traffic, blocks_digest, may_move_blocks
from tokenmill.engine.model import build_mtp_head, kv_storage, open_source
from tokenmill.engine.resolve import Resolved, resolve_model_config
from tokenmill.engine.scripted import scripted_config
from tokenmill.engine.speculation import LoadDraft, LoadHead, build_draft, make_drafter, no_draft, no_head
from tokenmill.engine.startup.triton_start import prestart_products, prestart_triton
from tokenmill.engine.status import CoreInfo
from tokenmill.errors import InvalidConfig
from tokenmill.guided.compile import Compiler
from tokenmill.guided.grammars import Grammars
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.kv.cache import KVCache
from tokenmill.kv.parted_cache import PartedKVCache
from tokenmill.kv.storage import KVStorage
from tokenmill.lora.peft_file import BaseWeight
from tokenmill.lora.read import read_adapter
from tokenmill.lora.sizes import MAX_RANK
from tokenmill.models.protocol import Model
from tokenmill.sampling.sampler import Sampler
from tokenmill.scheduler import Scheduler
from tokenmill.store import is_scripted
from tokenmill.text.script import TokenizedScript, read_script
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.source import WeightSource

if TYPE_CHECKING:
    from tokenmill.engine.ranks import ForkRank
    from tokenmill.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MakeRunner = Callable[[KVStorage, Sampler, int, int], Runner]

STEP_LIMITS_S = {"cpu": 0.1, "cuda": 0.05}  # default limits of a step that computes prompts while others decode


def build_core(
    config: EngineConfig,
    model_path: Path,
    *,
    fast_start: bool = False,
    while_compiling: Callable[[], None] = lambda: None,
    when_rank_dies: Callable[[str], None] = lambda _how: None,
    fork_rank: ForkRank | None = None,
    block_address: str = "",
) -> EngineCore:
    """Load a model and build the core that serves it. `while_compiling` is called while kernels are compiled, if any
    are. `when_rank_dies` is called from another thread if one of several ranks ends. `fork_rank`: starts ranks as
    copies of this process. `block_address`: the socket at which other cores can fetch its KV blocks; empty: none."""
    if is_scripted(config.model.model):
        return build_scripted_core(config, model_path, block_address)
    started = time.monotonic()
    if fast_start:
        prestart_triton(config)
    spec = read_spec(model_path)
    resolved = resolve_model_config(config, spec, model_path)
    warn_slow_backend(config, resolved)
    config = resolved.config
    assert config.ops.threads is not None
    torch.set_num_threads(config.ops.threads if resolved.backend.uses_torch_threads else 1)
    if config.parallel.num_ranks > 1:
        return build_ranked_core(
            resolved, spec, model_path, started, when_rank_dies, fork_rank, while_compiling, block_address
        )
    if fast_start:
        prestart_products(config)
    # The pool is allocated last: temporary memory of loading can be reused for it.
    with out_of_memory_hint("the weights do not fit", "quantization"):
        source = open_source(config, model_path, spec)
        model = resolved.backend.build_model(config, spec, source)
    torch.cuda.empty_cache()  # does nothing without a GPU
    with out_of_memory_hint("the KV cache does not fit beside the weights", "memory_fraction"):
        storage = kv_storage(config, spec)
    core = assemble(
        config,
        model,
        storage,
        lambda: load_vocabulary_of(config, model_path),
        lambda draft: build_draft(draft, config.model.max_context, model_path, spec),
        lambda: build_mtp_head(config, spec, model_path, model),
        adapters=adapter_store(config, spec, model, source, resolved.slot_values),
        digest=partial(blocks_digest, config, spec, model_path),
        block_address=block_address,
    )
    run_largest_step(core.runner, config.scheduler.num_tokens, resolved.workspace.step, while_compiling)
    return with_final_info(core, resolved, started)


def build_ranked_core(
    resolved: Resolved,
    spec: ModelSpec,
    model_path: Path,
    started: float,
    when_rank_dies: Callable[[str], None],
    fork_rank: ForkRank | None,
    while_compiling: Callable[[], None],
    block_address: str,
) -> EngineCore:
    """Build a core whose model is computed by several ranks; this process is rank 0."""
    from tokenmill.engine.rank_part import load_part  # imported only if there are several ranks
    from tokenmill.engine.ranked_blocks import ranked_records
    from tokenmill.engine.ranks import Ranks

    config = resolved.config
    are_blocks_moved = may_move_blocks(config, spec, block_address)
    ranks = Ranks(config, model_path, when_rank_dies, fork_rank, shares_pools=are_blocks_moved)
    with ExitStack() as unless_built:
        unless_built.callback(ranks.close)
        part = load_part(config, spec, model_path, 0, ranks.group, ranks.link)
        elsewhere = ranks.wait_until_loaded()
        adapters = None
        if config.model.adapter_slots:
            whole = open_source(config, model_path, spec)
            adapters = adapter_store(config, spec, part.model, whole, resolved.slot_values, elsewhere)
        core = assemble(
            config,
            part.model,
            part.storage,
            lambda: load_vocabulary_of(config, model_path),
            lambda draft: build_draft(draft, config.model.max_context, model_path, spec),
            make_runner=lambda _storage, sampler, *_limits: ranks.make_runner(part, sampler),
            adapters=adapters,
            digest=partial(blocks_digest, config, spec, model_path),
            block_address=block_address if are_blocks_moved else "",
            make_records=ranked_records(config, spec, part.storage, ranks.pools) if are_blocks_moved else None,
        )
        run_largest_step(core.runner, config.scheduler.num_tokens, resolved.workspace.step, while_compiling)
        unless_built.pop_all()
    return with_final_info(core, resolved, started)


def with_final_info(core: EngineCore, resolved: Resolved, started: float) -> EngineCore:
    """Complete the core's info with the reasons of its settings and its load time."""
    config = resolved.config
    core.info = msgspec.structs.replace(
        core.info,
        reasons=[*resolved.reasons, resolved.backend.describe_kernels(config)],
        pid=os.getpid(),
        load_s=time.monotonic() - started,
        adapters=core.adapters.loaded,
        num_adapter_slots=config.model.adapter_slots or 0,
    )
    return core


def adapter_store(
    config: EngineConfig,
    spec: ModelSpec,
    model: Model,
    source: WeightSource,
    slot_values: int,
    elsewhere: Set[str] = frozenset(),
) -> AdapterStore | None:
    """Return the store with the adapters that the config names; None if the model has no adapter slots. `elsewhere`:
    names of matrices that only other ranks have."""
    slots = model.adapter_slots
    if not config.model.adapter_slots or slots is None:
        return None
    store = AdapterStore(
        lambda path: read_adapter(path, spec, base_weights(source)),
        slots.names() | elsewhere,
        config.model.max_adapter_rank or MAX_RANK,
        slot_values,
    )
    for name, path in named_adapters(config.model.adapter).items():
        store.load(name, path)
    return store


def base_weights(source: WeightSource) -> BaseWeight:
    """Return a function that looks up a model's matrix by its internal name without ".weight"; a number after the name
    selects one expert."""

    def weight(name: str) -> torch.Tensor:
        stem, _, last = name.rpartition(".")
        if not last.isdigit():
            return dequantize(source.get(f"{name}.weight")).cpu()
        return dequantize(source.get(f"{stem}.weight"))[int(last)].cpu()

    return weight


def build_scripted_core(config: EngineConfig, script_path: Path, block_address: str = "") -> EngineCore:
    """Build the core of a scripted model; everything except the model is the same as for other models."""
    from tokenmill.engine.frontend import eos_ids, spec_and_tokenizer
    from tokenmill.runner.script_runner import ScriptModel, ScriptRunner

    script = read_script(script_path)
    spec, tokenizer = spec_and_tokenizer(config, script_path)
    assert tokenizer is not None
    config = scripted_config(config, script)
    ends = eos_ids(spec, tokenizer)
    if not ends:
        raise InvalidConfig("the script's tokenizer has no token that ends an answer", param="model")
    model = ScriptModel(TokenizedScript(script, tokenizer, ends[0]))
    core = assemble(
        config,
        model,
        kv_storage(config, spec),
        lambda: vocabulary_of(config, spec, tokenizer),
        make_runner=lambda storage, sampler, max_rows, context: ScriptRunner(
            model, storage, sampler, max_rows, context
        ),
        digest=partial(blocks_digest, config, spec, script_path),
        block_address=block_address,
    )
    reason = f"a scripted model ({script_path}): it has no weights"
    core.info = msgspec.structs.replace(core.info, reasons=[reason], pid=os.getpid())
    return core


def warn_slow_backend(asked: EngineConfig, resolved: Resolved) -> None:
    """Log that a slow backend is used because the fast ones can't compute the model, unless it was selected."""
    if resolved.backend.is_slow and asked.ops.backend == "auto":
        reason = "; ".join(resolved.refusals)
        log.warning("%s; computing with torch instead, many times slower and with more memory", reason)


def run_largest_step(runner: Runner, num_tokens: int, step_bytes: int, while_compiling: Callable[[], None]) -> None:
    with out_of_memory_hint("the largest step does not fit beside the weights and the KV cache", "token_budget"):
        runner.run_largest_step(num_tokens, step_bytes, while_compiling)


@contextmanager
def out_of_memory_hint(problem: str, param: str) -> Iterator[None]:
    """Turn an out-of-memory error during the start into an error with a hint. The memory was counted beforehand, so
    most likely another process has allocated some since."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise InvalidConfig(
            f"{problem} into the GPU's memory",
            param=param,
            hint="end other programs on the GPU, or lower memory_fraction, max_running or token_budget",
        ) from error


def assemble(
    config: EngineConfig,
    model: Model,
    storage: KVStorage,
    load_vocabulary: Callable[[], Vocabulary] = no_vocabulary,
    load_draft: LoadDraft = no_draft,
    load_head: LoadHead = no_head,
    make_runner: MakeRunner | None = None,
    adapters: AdapterStore | None = None,
    digest: BlocksDigest = bytes,
    block_address: str = "",
    make_records: MakeRecords | None = None,
) -> EngineCore:
    """Build scheduler and runner for a loaded model (a real one or a scripted one).

    `load_vocabulary` is called for the first request with a grammar: the core needs text for nothing else.
    `load_draft` is called if the config selects a draft model, `load_head` if it selects the model's own head that
    predicts further tokens. `make_runner`: by default the device's. `digest`: returns the digest of everything that
    blocks depend on; called if blocks are stored outside the pool. `block_address`: the socket at which other cores can
    fetch blocks; empty: none. `make_records`: makes the accessor that copies blocks, by default the one of `storage`.
    """
    assert config.model.max_context is not None
    max_rows = config.scheduler.num_rows
    cache = kv_cache(config, storage)
    traffic = block_traffic(config, storage, cache, digest, block_address, make_records)
    device = find_device(storage.device.type)
    grammars = Grammars(Compiler(load_vocabulary), max_rows, model.vocab_size)
    sampler = Sampler(model.vocab_size, max_rows, storage.device)
    if make_runner is None:
        runner = device.make_runner(model, storage, sampler, max_rows, config.model.max_context)
    else:
        runner = make_runner(storage, sampler, max_rows, config.model.max_context)
    scheduler = Scheduler(
        config=config.scheduler,
        cache=cache,
        max_rows=max_rows,
        clock=time.monotonic,
        continues=runner.continues,
        drafter=make_drafter(config, grammars.num_allowed, load_draft, load_head, runner),
        num_adapter_slots=0 if adapters is None else config.model.adapter_slots or 0,
        step_limit_s=step_limit_s(config.scheduler, device.name),
        promised=read_service_level(config.scheduler.slo),
        num_lanes=config.parallel.num_lanes,
        fetcher=traffic,
    )
    if adapters is not None:
        runner.adapters = adapters.by_digest
    info = CoreInfo(
        max_context=config.model.max_context,
        num_blocks=1 + cache.num_usable,
        block_size=storage.block_size,
        max_running=max_rows,
        device=device.name,
        backend=config.ops.backend,
        kv_dtype=config.cache.kv_dtype,
        block_address=block_address if traffic is not None else "",
    )
    return EngineCore(scheduler, runner, info, grammars=grammars, adapters=adapters, traffic=traffic)


def kv_cache(config: EngineConfig, storage: KVStorage) -> KVCache:
    """Return the bookkeeping of a KV pool, or, with data-parallel attention, of the pools of all ranks, each with the
    contexts of some sequences."""
    if config.parallel.dp_attention:
        return PartedKVCache(
            num_parts=config.parallel.tp,
            windows=storage.layout.windows,
            rows_per_block=storage.layout.rows_per_block,
            num_blocks=storage.num_blocks,
            block_size=storage.block_size,
            prefix_caching=config.cache.prefix_caching,
        )
    return KVCache(
        windows=storage.layout.windows,
        rows_per_block=storage.layout.rows_per_block,
        kinds=[group.kind for group in storage.layout.groups],
        num_cells=storage.num_cells,
        num_states=storage.num_states,
        num_blocks=storage.num_blocks,
        block_size=storage.block_size,
        prefix_caching=config.cache.prefix_caching,
    )


def step_limit_s(scheduler: SchedulerConfig, device: str) -> float | None:
    """Return the time limit of a step that computes prompts while other sequences decode; None: no limit."""
    if scheduler.step_ms is None:
        return read_service_level(scheduler.slo).tpot_s or STEP_LIMITS_S[device]
    return scheduler.step_ms / 1000 or None


def load_vocabulary_of(config: EngineConfig, model_path: Path) -> Vocabulary:
    # Imported here to keep the start short: a core needs text only for grammars.
    from tokenmill.engine.frontend import spec_and_tokenizer

    spec, tokenizer = spec_and_tokenizer(config, model_path)
    return no_vocabulary() if tokenizer is None else vocabulary_of(config, spec, tokenizer, is_own=True)


def vocabulary_of(config: EngineConfig, spec: ModelSpec, tokenizer: Tokenizer, *, is_own: bool = False) -> Vocabulary:
    """Return the vocabulary for grammars. The markers of reasoning and tool calls are not text: no string may contain
    them. `is_own`: nothing else uses the tokenizer."""
    from tokenmill.engine.frontend import eos_ids
    from tokenmill.engine.tool_use import SpeechFinder

    speech = SpeechFinder(tokenizer, config.model.tool_format).of(None)
    markers = () if speech is None else tuple(speech.control.values())
    if is_own:
        tokenizer.read_literally()
    return Vocabulary(tokenizer, spec.vocab_size, eos_ids(spec, tokenizer), markers)
