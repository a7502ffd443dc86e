"""The state of an engine: the model it serves, its health, its statistics."""

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
    shifts_context: bool = False  # the default for requests
    can_call_tools: bool = False
    can_think: bool = False
    can_fill_in: bool = False  # fill-in-the-middle: completions with a suffix
    path: Path | None = None  # of the weights
    chat_template: str = ""  # the model's own; empty if it has none
    device: str = ""
    kv_block_size: int = 0  # tokens
    is_deterministic: bool = False  # a request's answer does not depend on the other requests of its batch
    max_running: int = 0  # the most sequences computed in one step
    defaults: dict[str, Any] = field(default_factory=dict)  # the model's own SamplingParams
    manifest: Manifest | None = None  # of a model made with `tokenmill create`
    adapters: tuple[str, ...] = ()  # names of the loaded adapters
    num_adapter_slots: int = 0  # 0: no adapter can be loaded


@dataclass(frozen=True)
class Health:
    state: EngineState
    detail: str = ""
    is_given_up: bool = False  # dead and not restarted: the server itself must be restarted


def require_ready(health: Health) -> None:
    """Raise the error that a new request gets in this state, if it can't be accepted."""
    if health.state == "draining":
        raise Draining("the server is shutting down", retry_after_s=5)
    if health.state != "ready":
        raise EngineDead(f"the engine is not ready: {health.detail or health.state}")


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    running: int = 0
    waiting: int = 0
    waiting_for_grammar: int = 0  # included in `waiting`
    wait_s: float = 0.0  # the queue time of recently started requests
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    fetched_tokens: int = 0  # prompt tokens whose blocks were fetched into the pool; included in `prefix_hit_tokens`
    fetched_bytes: int = 0  # of blocks fetched into the pool from tiers or other cores
    fetch_s: float = 0.0  # time that these fetches took
    saved_bytes: int = 0  # of blocks saved to tiers
    preemptions: int = 0
    steps: int = 0
    failed_steps: int = 0  # steps that raised; their requests were retried and may have succeeded
    busy_s: float = 0.0  # time spent in steps
    step_counts: list[int] = []  # histogram of steps by their number of tokens; buckets `observe.buckets.STEP_TOKENS`
    step_tokens: int = 0  # computed in all steps
    drafted_tokens: int = 0  # proposed by speculation and computed
    accepted_tokens: int = 0  # of these, accepted
    engine_pid: int = 0
    restarts: int = 0  # after deaths of the engine process
    resumed: int = 0  # requests that continued in another process


class LoadedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that requests may select by name."""

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
    """The settings that a core resolved while loading, as its front needs them."""

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
    adapters: list[LoadedAdapter] = []  # the adapters that the config names
    num_adapter_slots: int = 0
    block_address: str = ""  # the socket at which other cores of its machine can fetch blocks; empty: none
