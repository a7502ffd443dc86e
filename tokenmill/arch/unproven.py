"""Kernels that have not been verified on a GPU yet, and the environment variable that enables them anyway.

A kernel written without access to a GPU is tested in Triton's interpreter and compiled for Hopper, but its results and
speed on a GPU are unknown. Such a kernel is off by default. Once `tests/gpu` passes with it and it is faster than what
it replaces, adding the GPU to its row here enables it.

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
    "gpu_ranks", "gpu_sums", "gpu_iq4", "gpu_reorder", "gpu_recurrent_only",
]  # fmt: skip


class KernelTrial(NamedTuple):
    """A set of kernels that is not enabled on every GPU."""

    what: str  # what they compute
    instead: str  # how that is computed without them
    proven_on: tuple[str, ...] = ()  # GPUs on which tests/gpu passed with them


TRIALS: dict[KernelSet, KernelTrial] = {
    "gpu_ranks": KernelTrial(
        "ranks on several GPUs, or more than eight on one (--tp, --pp): up to eight on one H200 are proven", "refused"
    ),
    "gpu_sums": KernelTrial(
        "all-reduce of partial products between ranks on GPUs, two exchanges per layer, unquantised matrices only",
        "all-gather without sums, four exchanges per layer",
    ),
    "gpu_iq4": KernelTrial("IQ4_NL and IQ4_XS matrices in 4 bits on Hopper", "stored as 8-bit integers with scales"),
    "gpu_recurrent_only": KernelTrial("models of recurrent layers alone (Mamba-2) on a GPU", "refused"),
    "gpu_reorder": KernelTrial(
        "activations of more than 16 rows reordered for act order row by row",
        "reordered element by element, slower for many rows",
    ),
}


def is_chosen(kernels: KernelSet) -> bool:
    """Return whether these kernels are used: because they are proven, or enabled by the variable."""
    return bool(TRIALS[kernels].proven_on) or kernels in _enabled()


def not_chosen() -> Iterator[tuple[KernelSet, KernelTrial]]:
    return ((name, trial) for name, trial in TRIALS.items() if not is_chosen(name))


def _enabled() -> tuple[str, ...]:
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value in ("", "0", "no", "false", "off"):
        return ()
    if value in ("1", "yes", "true", "on", "all"):
        return get_args(KernelSet)
    names = tuple(part.strip() for part in value.split(","))
    for name in names:
        if name not in TRIALS:
            raise InvalidConfig(f"{VARIABLE}: unknown kernels {name!r}", hint=f"1, or some of {', '.join(TRIALS)}")
    return names
