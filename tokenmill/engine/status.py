"""An engine's reports about itself: the model it serves, its health, its load."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenmill.arch.spec import ModelSpec
from tokenmill.errors import Draining, EngineDead
from tokenmill.store.layout import Manifest

EngineState = Literal["loading", "ready", "stalled", "draining", "stopped", "dead"]


@dataclass(frozen=True)
class ModelInfo:
    name: str
    max_context: int
    vocab_size: int
    created: int  # seconds since the epoch
    fingerprint: str  # constant for a build, a model and its settings
    spec: ModelSpec
    can_embed: bool
    shifts_context: bool = False  # unless a request says otherwise
    can_call_tools: bool = False
    can_think: bool = False
    can_fill_in: bool = False  # what belongs between two texts (a completion's suffix)
    path: Path | None = None  # of the weights
    chat_template: str = ""  # the model's own; empty: it has none
    device: str = ""
    kv_block_size: int = 0  # tokens
    is_deterministic: bool = False  # the same request has the same answer, whatever runs beside it
    max_running: int = 0  # sequences computed together at most
    defaults: dict[str, Any] = field(default_factory=dict)  # the model's own SamplingParams
    manifest: Manifest | None = None  # of a created model
    adapters: tuple[str, ...] = ()  # names of those that are loaded
    num_adapter_slots: int = 0  # 0: none can be


@dataclass(frozen=True)
class Health:
    state: EngineState
    detail: str = ""
    is_given_up: bool = False  # dead for good: only a new process of the server helps


def require_ready(health: Health) -> None:
    """Raise what a new request gets in this state: the one rule for all places that take requests."""
    if health.state == "draining":
        raise Draining("the server is shutting down", retry_after_s=5)
    if health.state != "ready":
        raise EngineDead(f"the engine is not ready: {health.detail or health.state}")


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    running: int = 0
    waiting: int = 0
    waiting_for_grammar: int = 0  # among them
    wait_s: float = 0.0  # how long requests waited that started lately
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    fetched_tokens: int = 0  # prompt tokens whose blocks were brought from elsewhere; among `prefix_hit_tokens`
    fetched_bytes: int = 0  # of blocks
    fetch_s: float = 0.0  # that bringing them took
    saved_bytes: int = 0  # of blocks that were kept elsewhere
    preemptions: int = 0
    steps: int = 0
    failed_steps: int = 0  # that raised; their requests were tried again, and may have ended well
    busy_s: float = 0.0  # time spent in steps
    step_counts: list[int] = []  # steps by how many tokens they computed, in buckets of `observe.buckets.STEP_TOKENS`
    step_tokens: int = 0  # computed in all steps
    drafted_tokens: int = 0  # proposed by speculation and computed
    accepted_tokens: int = 0  # ... and accepted
    engine_pid: int = 0
    restarts: int = 0  # after deaths of the engine's process
    resumed: int = 0  # requests that went on with another process


class LoadedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that requests may ask for by name."""

    name: str
    digest: str
    rank: int
    num_values: int
    path: str


class FailedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that could not be loaded, and why."""

    name: str
    message: str
    code: str


class CoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a core has resolved while loading, as its front needs it."""

    max_context: int
    num_blocks: int
    block_size: int
    max_running: int = 0
    device: str = ""
    backend: str = ""
    kv_dtype: str = ""
    reasons: list[str] = []  # why each automatic choice was made, for the start-up log
    pid: int = 0
    load_s: float = 0.0
    adapters: list[LoadedAdapter] = []  # those that the config names
    num_adapter_slots: int = 0
    block_address: str = ""  # the socket at which other cores on its machine may ask for blocks; empty: none
