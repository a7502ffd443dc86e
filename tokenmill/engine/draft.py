"""The draft model of speculation: a second model beside the first, with the same vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import EngineConfig, SchedulerConfig
from tokenmill.engine.facts import machine_facts
from tokenmill.engine.model import build_model, kv_storage, open_source
from tokenmill.engine.resolve import resolve
from tokenmill.errors import InvalidConfig
from tokenmill.kv.cache import KVCache
from tokenmill.kv.layout import KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import Model
from tokenmill.runner.runner import ModelRunner
from tokenmill.sampling.sampler import Sampler
from tokenmill.speculate.draft_model import DraftModel
from tokenmill.store import resolve_model


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
    from tokenmill.engine.frontend import tokenizer_of

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
