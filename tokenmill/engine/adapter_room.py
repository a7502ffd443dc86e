"""The number of adapter slots of a model and their memory, computed before anything is loaded.

A slot has room for each adapter that the config names, and for one of the largest rank that changes every matrix of the
layers; matrices of experts are included if a named adapter changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.arch.spec import ModelSpec
from tokenmill.config.adapters import named_adapters
from tokenmill.config.engine import ModelConfig
from tokenmill.lora.sizes import adapter_size, slot_values

MAX_AUTO_SLOTS = 8
DEFAULT_RANK = 64


@dataclass(frozen=True)
class AdapterRoom:
    slots: int
    rank: int | None
    slot_values: int = 0
    total_bytes: int = 0
    reasons: list[str] = field(default_factory=list)


def resolve_adapters(config: ModelConfig, spec: ModelSpec, value_bytes: int) -> AdapterRoom:
    named = named_adapters(config.adapter)
    slots = min(len(named), MAX_AUTO_SLOTS) if config.adapter_slots is None else config.adapter_slots
    if not slots:
        return AdapterRoom(0, None)
    sizes = [adapter_size(path, spec) for path in named.values()]
    rank = config.max_adapter_rank or max((size.rank for size in sizes), default=DEFAULT_RANK)
    values = max([slot_values(spec, rank, named_expert_rank(config, spec)), *(size.num_values for size in sizes)])
    total_bytes = slots * values * value_bytes
    reason = f"adapters: {slots} slots for ranks up to {rank}, {total_bytes / 2**30:.2f} GiB"
    return AdapterRoom(slots, rank, values, total_bytes, [reason])


def named_expert_rank(config: ModelConfig, spec: ModelSpec) -> int:
    """Return the largest rank of the named adapters' expert matrices; 0 if none of them changes experts."""
    sizes = (adapter_size(path, spec) for path in named_adapters(config.adapter).values())
    return max((size.expert_rank for size in sizes), default=0)
