"""Statistics of the scheduler: the first five fields are gauges, the others are counters."""

from __future__ import annotations

from typing import Any

import msgspec


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    running: int  # sequences
    waiting: int  # sequence groups: requests, and preempted samples
    kv_blocks_used: int
    kv_blocks_total: int
    wait_s: float = 0.0  # moving average of the queue time of started requests
    steps: int = 0
    preemptions: int = 0
    finished: int = 0  # requests, for any reason
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0  # of admitted requests
    computed_tokens: int = 0  # fed to the model, including recomputed ones
    generated_tokens: int = 0
    drafted_tokens: int = 0  # drafts that were computed
    accepted_tokens: int = 0  # drafts that were accepted
    fetched_tokens: int = 0  # prompt tokens whose blocks were fetched from tiers or other cores
    block_waits: int = 0  # rows left out of a plan because blocks were held by steps in flight


class Counters:
    """The running values of `SchedulerStats`."""

    __slots__ = (
        "accepted_tokens",
        "block_waits",
        "computed_tokens",
        "drafted_tokens",
        "fetched_tokens",
        "finished",
        "generated_tokens",
        "preemptions",
        "prefix_hit_tokens",
        "prefix_query_tokens",
        "prompt_tokens",
        "steps",
        "wait_s",
    )

    def __init__(self) -> None:
        self.wait_s = 0.0  # moving average
        self.steps = 0
        self.preemptions = 0
        self.finished = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.prompt_tokens = 0
        self.computed_tokens = 0
        self.generated_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.fetched_tokens = 0
        self.block_waits = 0

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}
