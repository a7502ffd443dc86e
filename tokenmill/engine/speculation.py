"""Which speculation an engine runs, and the draft model where one is asked for.

Answers don't depend on guesses, so an engine whose guesses fail goes on without them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from tokenmill.config import EngineConfig, ModelConfig
from tokenmill.errors import InvalidConfig
from tokenmill.scheduler.speculation import NO_DRAFTS, Drafter, Drafting, NumAllowed, Speculation
from tokenmill.speculate.depth import CostModelDepth, ThresholdDepth
from tokenmill.speculate.draft_model import DraftModel
from tokenmill.speculate.draft_model_proposer import DraftModelProposer
from tokenmill.speculate.draft_request import DraftRequest
from tokenmill.speculate.draft_state import DraftState
from tokenmill.speculate.ngram_proposer import NgramProposer
from tokenmill.speculate.step_cost import StepCost

log = logging.getLogger(__name__)

DRAFT = "draft:"
MODES = f"off, auto, ngram or {DRAFT}MODEL"

LoadDraft = Callable[[EngineConfig], DraftModel]


def no_draft(config: EngineConfig) -> DraftModel:
    raise InvalidConfig("this engine has no way to load a draft model", param="speculate")


def make_drafter(config: EngineConfig, num_allowed: NumAllowed, load_draft: LoadDraft) -> Drafter:
    mode = config.scheduler.speculate
    if mode == "off":
        return NO_DRAFTS
    guessing = DisableOnError(speculation(mode, config, load_draft))
    return Drafting(guessing, num_allowed, config.scheduler.num_tokens)


class DisableOnError:
    """A speculation until it raises anything; nothing from then on. What it held, a draft model too, is let go."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation: Speculation | None = speculation

    def propose(self, asks: Sequence[DraftRequest], num_rows: int, num_tokens: int) -> list[list[int]]:
        if self._speculation is not None:
            try:
                return self._speculation.propose(asks, num_rows, num_tokens)
            except Exception:
                log.exception("speculation failed and is off from now on; answers stay the same, only slower")
                self._speculation = None
        return [[] for _ in asks]

    def note_step(self, num_tokens: int, seconds: float) -> None:
        if self._speculation is not None:
            self._speculation.note_step(num_tokens, seconds)

    def note_end(self, trail: DraftState, tokens: Sequence[int], prompt_len: int) -> None:
        if self._speculation is not None:
            self._speculation.note_end(trail, tokens, prompt_len)


def speculation(mode: str, config: EngineConfig, load_draft: LoadDraft) -> Speculation:
    cost = StepCost()
    if mode.startswith(DRAFT):
        return DraftModelProposer(load_draft(draft_config(config)))
    return NgramProposer(ThresholdDepth() if mode == "ngram" else CostModelDepth(cost), cost)


def draft_config(config: EngineConfig) -> EngineConfig:
    """The draft model runs beside the other one: the same rows, kernels and threads, a cache of its own."""
    model = ModelConfig(model=config.scheduler.speculate.removeprefix(DRAFT))
    cache = replace(config.cache, num_blocks=None, kv_dtype="auto", prefix_caching=True)
    return replace(config, model=model, cache=cache, scheduler=replace(config.scheduler, speculate="off"))


def resolve_mode(asked: str, device: str) -> tuple[str, str]:
    """The mode to run, and why, in words."""
    if asked not in ("off", "auto", "ngram") and not asked.startswith(DRAFT):
        raise InvalidConfig(f"speculate must be {MODES}, not {asked!r}", param="speculate")
    if asked == DRAFT:
        raise InvalidConfig("draft: needs a model", param="speculate", hint="--speculate draft:MODEL")
    if device == "cuda" and asked not in ("off", "auto"):
        raise InvalidConfig(
            f"speculate {asked} was asked for, but on a GPU steps overlap, and drafts can't be checked in time",
            param="speculate",
            hint="leave it at auto, which is off there",
        )
    if device == "cuda" and asked == "auto":
        return "off", "speculation off: on a GPU the next step starts before this one is known"
    told = {
        "off": "speculation off",
        "auto": "speculation: guesses from earlier text, as far as they pay",
        "ngram": "speculation: all likely guesses from earlier text",
    }
    return asked, told.get(asked, f"speculation: {asked.removeprefix(DRAFT)} guesses")
