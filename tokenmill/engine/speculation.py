"""Setup of speculative decoding: the proposer of draft tokens, and the draft model if one is configured.

auto, ngram     draft tokens from the request's own text and from recent answers
draft:MODEL     a second, smaller model with the same vocabulary
mtp             the model's own head that predicts one more token
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from tokenmill.engine.model import kv_storage, open_source
from tokenmill.engine.mtp_room import MTP, mtp_blocks
from tokenmill.engine.resolve import DRAFT_PREFIX, resolve_model_config
from tokenmill.errors import InvalidConfig
from tokenmill.kv.cache import KVCache
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.mtp_head import KeptStates, MtpHead
from tokenmill.models.protocol import Model
from tokenmill.runner.runner import ModelRunner
from tokenmill.sampling.sampler import Sampler
from tokenmill.scheduler.speculation import NO_DRAFTS, Drafter, Drafting, NumAllowed, Speculation
from tokenmill.speculate.depth import CostModelDepth, StepCost, ThresholdDepth
from tokenmill.speculate.draft_model import DraftModel, DraftModelProposer, States
from tokenmill.speculate.mtp import HeadStates
from tokenmill.speculate.ngram_proposer import NgramProposer
from tokenmill.store import resolve_model

LoadDraft = Callable[[EngineConfig], DraftModel]
LoadHead = Callable[[], MtpHead]


def no_draft(config: EngineConfig) -> DraftModel:
    raise InvalidConfig("this engine can't load a draft model", param="speculate")


def no_head() -> MtpHead:
    raise InvalidConfig("this engine can't load a head that predicts further tokens", param="speculate")


def make_drafter(
    config: EngineConfig, num_allowed: NumAllowed, load_draft: LoadDraft, load_head: LoadHead, target: object
) -> Drafter:
    """Build the drafter of the configured mode; `target`: the runner of the target model."""
    mode = config.scheduler.speculate
    if mode == "off":
        return NO_DRAFTS
    if mode == MTP:
        assert isinstance(target, ModelRunner), "see `resolve_speculation`"
        found: Speculation = DraftModelProposer(head_proposer(config, load_head(), target))
    else:
        found = speculation(mode, config, load_draft)
    return Drafting(found, num_allowed, config.scheduler.num_tokens)


def head_proposer(config: EngineConfig, head: MtpHead, target: ModelRunner) -> DraftModel:
    """Use a head of the target model as a draft model: it has a cache of one layer, and reads the target's hidden
    states."""
    cache = config.cache
    assert config.model.max_context is not None and cache.num_blocks is not None
    layout = KVLayout.from_spec(head.spec, CacheDtypes(cache.kv_dtype, config.model.dtype))
    num_blocks = mtp_blocks(cache.num_blocks, target.storage.layout)
    storage = KVStorage(layout, num_blocks, cache.tokens_per_block, target.storage.device)
    target.kept_states = KeptStates()
    states = HeadStates(head, target.kept_states)
    return draft_model(head, storage, config.scheduler, config.model.max_context, states)


def speculation(mode: str, config: EngineConfig, load_draft: LoadDraft) -> Speculation:
    cost = StepCost()
    if mode.startswith(DRAFT_PREFIX):
        return DraftModelProposer(load_draft(draft_config(config)))
    return NgramProposer(ThresholdDepth() if mode == "ngram" else CostModelDepth(cost), cost)


def draft_config(config: EngineConfig) -> EngineConfig:
    """Return the config of the draft model: the same rows, kernels and threads, and a separate cache."""
    model = ModelConfig(model=config.scheduler.speculate.removeprefix(DRAFT_PREFIX))
    cache = replace(config.cache, num_blocks=None, num_states=None, kv_dtype="auto", prefix_caching=True)
    return replace(config, model=model, cache=cache, scheduler=replace(config.scheduler, speculate="off"))


# ── the draft model ────────────────────────────────────────────────────────────────────────────────────


def build_draft(config: EngineConfig, target_context: int | None, target_path: Path, target: ModelSpec) -> DraftModel:
    """Load the draft model with its own runner and cache, into the memory that the target model leaves free."""
    assert target_context is not None
    path = resolve_model(config.model.model).path
    spec = read_spec(path)
    require_same_vocabulary(path, spec, target_path, target)
    model_config = replace(config.model, max_context=min(target_context, spec.max_context))
    config = replace(config, model=model_config, parallel=ParallelConfig())  # rank 0 has the whole draft model
    resolved = resolve_model_config(config, spec, path)
    config = resolved.config
    assert config.model.max_context is not None
    storage = kv_storage(config, spec)
    model = resolved.backend.build_model(config, spec, open_source(config, path, spec))
    return draft_model(model, storage, config.scheduler, config.model.max_context)


def draft_model(
    model: Model, storage: KVStorage, scheduler: SchedulerConfig, max_context: int, states: States | None = None
) -> DraftModel:
    if storage.layout.is_recurrent:
        raise InvalidConfig("a model with recurrent layers can't propose draft tokens yet", param="speculate")
    max_rows = scheduler.num_rows
    runner = ModelRunner(model, storage, Sampler(model.vocab_size, max_rows, storage.device), max_rows, max_context)
    cache = KVCache(
        windows=storage.layout.windows,
        rows_per_block=storage.layout.rows_per_block,
        num_blocks=storage.num_blocks,
        block_size=storage.block_size,
    )
    return DraftModel(runner, cache, max_context, scheduler.num_tokens, states)


def require_same_vocabulary(path: Path, spec: ModelSpec, target_path: Path, target: ModelSpec) -> None:
    """Refuse a draft model in which a token id stands for another text than in the target model."""
    from tokenmill.engine.frontend import tokenizer_of  # imported only for draft models

    own, other = tokenizer_of(path), tokenizer_of(target_path)
    problem = None
    if spec.vocab_size != target.vocab_size:
        problem = f"it has {spec.vocab_size} tokens, the model {target.vocab_size}"
    elif own is not None and other is not None:
        differing = next((i for i in range(spec.vocab_size) if own.token_bytes(i) != other.token_bytes(i)), None)
        problem = None if differing is None else f"token {differing} differs"
    if problem is not None:
        raise InvalidConfig(
            f"{path.name} can't propose tokens for {target_path.name}: {problem}",
            param="speculate",
            hint="a draft model needs the same vocabulary; use a smaller model of the same family",
        )
