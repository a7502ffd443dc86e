"""Puts a core together: the model on its device, the KV pool, scheduler and runner."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch

from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import EngineConfig
from tokenmill.engine.core import EngineCore, Runner, no_vocabulary, nothing_left
from tokenmill.engine.draft import build_draft
from tokenmill.engine.facts import machine_facts
from tokenmill.engine.model import build_model, kv_storage, native_reason, open_source, ops_wanted
from tokenmill.engine.resolve import planned_bytes, resolve
from tokenmill.engine.speculation import LoadDraft, make_drafter, no_draft
from tokenmill.engine.status import CoreInfo
from tokenmill.errors import InvalidConfig
from tokenmill.guided.compile import Compiler
from tokenmill.guided.grammars import Grammars
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.kv.cache import KVCache
from tokenmill.kv.layout import KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import Model
from tokenmill.ops.table import choose_ops
from tokenmill.runner.runner import ModelRunner
from tokenmill.sampling.sampler import Sampler
from tokenmill.scheduler import Scheduler
from tokenmill.types import StepPlan

log = logging.getLogger(__name__)


def nothing_to_do() -> None:
    pass


def build_core(
    config: EngineConfig, model_path: Path, while_compiling: Callable[[], None] = nothing_to_do
) -> EngineCore:
    """`while_compiling` is called where a start waits for compilers, if it does."""
    started = time.monotonic()
    prestart_compilers(config)
    spec = read_spec(model_path)
    layout = KVLayout.from_spec(spec)
    facts = machine_facts(config, spec, model_path)
    resolved = resolve(config, spec, layout, facts)
    settled = resolved.config
    warn_slow_backend(config, settled, facts.native_reason)
    assert settled.ops.threads is not None and settled.model.max_context is not None
    # Native kernels bring their own threads; torch's would wait in busy loops on the same cores.
    torch.set_num_threads(1 if settled.ops.backend == "cpu" else settled.ops.threads)
    # The pool comes last: what loading needs for a moment may lie where the pool will.
    with advice_where_memory_ends("the weights do not fit", "quantization"):
        model, op_reasons = build_model(settled, spec, open_source(settled, model_path, spec))
    if settled.ops.device == "cuda":
        torch.cuda.empty_cache()
    with advice_where_memory_ends("the KV cache does not fit beside the weights", "memory_fraction"):
        storage = kv_storage(settled, layout)
    core = assemble(
        settled,
        model,
        storage,
        lambda: vocabulary_of(model_path, spec),
        lambda draft: build_draft(draft, settled.model.max_context, model_path, spec),
    )
    if storage.device.type == "cuda":
        step_bytes = planned_bytes(spec, settled, has_words=facts.has_words).step
        run_largest_step(core.runner, settled.scheduler.num_tokens, step_bytes, while_compiling)
    core.info = msgspec.structs.replace(
        core.info,
        reasons=[*resolved.reasons, *op_reasons],
        pid=os.getpid(),
        load_s=time.monotonic() - started,
    )
    return core


def prestart_compilers(config: EngineConfig) -> None:
    """Triton gets ready while the device is opened and weights are loaded."""
    is_wanted = config.ops.device != "cpu" and config.ops.backend in ("auto", "triton")
    if is_wanted and torch.cuda.is_available() and find_spec("triton") is not None:
        from tokenmill.ops.triton.launch.preload import begin  # imports Triton: once, in one thread

        begin()


def warn_slow_backend(asked: EngineConfig, settled: EngineConfig, reason: str | None) -> None:
    """Torch's reference serves everything, slowly: nobody should find that out by waiting."""
    if settled.ops.backend == "reference" and asked.ops.backend == "auto":
        log.warning("%s; computing with torch instead, many times slower and with more memory", reason)


def run_largest_step(runner: Any, num_tokens: int, step_bytes: int, while_compiling: Callable[[], None]) -> None:
    with advice_where_memory_ends("the largest step does not fit beside the weights and the KV cache", "token_budget"):
        runner.run_largest_step(num_tokens, step_bytes, while_compiling)


@contextmanager
def advice_where_memory_ends(told: str, param: str) -> Iterator[None]:
    """What does not fit must fail at start, with a word of advice, and not under load. It was counted beforehand, so
    most likely another process has taken memory since."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise InvalidConfig(
            f"{told} into the GPU's memory",
            param=param,
            hint="end what else runs there, or lower memory_fraction, max_running or token_budget",
        ) from error


def explain_choices(config: EngineConfig, model_path: Path) -> list[str]:
    """What would be chosen for a model here, and why, without loading it."""
    spec = read_spec(model_path)
    resolved = resolve(config, spec, KVLayout.from_spec(spec), machine_facts(config, spec, model_path))
    if resolved.config.ops.backend == "cpu":
        return [*resolved.reasons, native_reason()]
    return [*resolved.reasons, *choose_ops(ops_wanted(resolved.config, spec))[1]]


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
    runner = make_runner(model, storage, sampler, max_rows, config.model.max_context, scheduler.plan_ahead)
    info = CoreInfo(
        max_context=config.model.max_context,
        num_blocks=storage.num_blocks,
        block_size=storage.block_size,
        max_running=max_rows,
    )
    next_idle_task = getattr(runner, "next_idle_task", nothing_left)
    return EngineCore(scheduler, runner, info, grammars=grammars, next_idle_task=next_idle_task)


def vocabulary_of(model_path: Path, spec: ModelSpec) -> Vocabulary:
    # Text is needed for grammars only, and a start is to be quick.
    from tokenmill.engine.frontend import eos_ids, tokenizer_of

    tokenizer = tokenizer_of(model_path)
    if tokenizer is None:
        return no_vocabulary()
    return Vocabulary(tokenizer, spec.vocab_size, eos_ids(spec, tokenizer))


def make_runner(
    model: Model,
    storage: KVStorage,
    sampler: Sampler,
    max_rows: int,
    max_context: int,
    plan_ahead: Callable[[], StepPlan | None],
) -> Runner:
    if storage.device.type != "cuda":
        return ModelRunner(model, storage, sampler, max_rows, max_context)
    from tokenmill.runner.cuda_runner import CudaRunner  # needs Triton, which a machine without a GPU may not have

    return CudaRunner(model, storage, sampler, max_rows, max_context, plan_ahead)
