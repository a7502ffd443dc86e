"""Kernels and graphs that are not proven on a GPU yet, and the variable that chooses them all the same.

A kernel that was written where no GPU is at hand is tested in Triton's interpreter and compiled for Hopper; what it
computes on a GPU, and how fast, is not known. Nothing chooses such a kernel by itself. Once `tests/gpu` passed with it
and it was faster than what it replaces, the GPU is named in its row here, which is all that it takes to have it chosen.

    TOKENMILL_UNPROVEN_KERNELS=1            all of them
    TOKENMILL_UNPROVEN_KERNELS=gpu_ranks    some of them
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from tokenmill.errors import InvalidConfig

VARIABLE = "TOKENMILL_UNPROVEN_KERNELS"
KernelSet = Literal[
    "gpu_ranks", "gpu_rank_adapters", "gpu_stages", "gpu_sums", "gpu_expert_adapters", "gpu_iq4", "gpu_reorder"
]  # fmt: skip


class KernelTrial(NamedTuple):
    what: str  # that is computed with these kernels
    instead: str  # how the same is computed without them
    proven_on: tuple[str, ...] = ()  # GPUs on which tests/gpu passed with them


TRIALS: dict[KernelSet, KernelTrial] = {
    "gpu_ranks": KernelTrial(
        "ranks on several GPUs, or more than eight on one (--tp): up to eight on one H200 are proven", "refused"
    ),
    "gpu_rank_adapters": KernelTrial("adapters on several ranks with GPUs", "refused"),
    "gpu_stages": KernelTrial("pipelines of stages on GPUs (--pp)", "refused"),
    "gpu_sums": KernelTrial(
        "products of ranks on GPUs summed, two exchanges a layer, but of quantised matrices",
        "put together without sums, four exchanges a layer",
    ),
    "gpu_expert_adapters": KernelTrial("adapters of routed experts on a GPU", "refused"),
    "gpu_iq4": KernelTrial("matrices of IQ4_NL and IQ4_XS in their 4 bits on Hopper", "kept in 8 bits and scales"),
    "gpu_reorder": KernelTrial(
        "more than 16 rows of activations put into act order as whole rows", "number by number, slower for many rows"
    ),
}


def is_chosen(kernels: KernelSet) -> bool:
    """Return whether these kernels are chosen: proven, or asked for."""
    return bool(TRIALS[kernels].proven_on) or kernels in _asked_for()


def not_chosen() -> Iterator[tuple[KernelSet, KernelTrial]]:
    return ((name, trial) for name, trial in TRIALS.items() if not is_chosen(name))


def _asked_for() -> tuple[str, ...]:
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value in ("", "0", "no", "false", "off"):
        return ()
    if value in ("1", "yes", "true", "on", "all"):
        return get_args(KernelSet)
    names = tuple(part.strip() for part in value.split(","))
    for name in names:
        if name not in TRIALS:
            raise InvalidConfig(f"{VARIABLE}: there are no kernels {name!r}", hint=f"1, or some of {', '.join(TRIALS)}")
    return names
