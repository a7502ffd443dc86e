"""Kernels that no GPU has run yet, and the variable that chooses them all the same.

A kernel that was written where no GPU is at hand is tested in Triton's interpreter and compiled for Hopper; what it
computes on a GPU, and how fast, is not known. Nothing chooses such a kernel by itself. Once `tests/gpu` passed with it
and it was faster than what it replaces (`benchmarks/gpu_unproven.py` shows both), the GPU is named in its row here,
which is all that it takes to have it chosen.

    TOKENMILL_UNPROVEN_KERNELS=1                        all of them
    TOKENMILL_UNPROVEN_KERNELS=fp8_blocks,fp4_matrices  some of them
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from tokenmill.errors import InvalidConfig

VARIABLE = "TOKENMILL_UNPROVEN_KERNELS"
KernelSet = Literal[
    "fp8_blocks", "fp4_matrices", "sparse_attention", "ungated_experts", "tiled_recurrence", "gpu_ranks"
]


class KernelTrial(NamedTuple):
    what: str  # that is computed with these kernels
    instead: str  # how the same is computed without them
    proven_on: tuple[str, ...] = ()  # GPUs on which tests/gpu passed with them


TRIALS: dict[KernelSet, KernelTrial] = {
    "fp8_blocks": KernelTrial(
        "fp8 with a scale for 128 columns, matrices and experts, multiplied as stored", "expanded while it is loaded"
    ),
    "fp4_matrices": KernelTrial(
        "NVFP4, and MXFP4 outside of experts, multiplied in its 4 bits", "packed as integers of 8 bits"
    ),
    "sparse_attention": KernelTrial(
        "latent attention over entries that an indexer chooses (DeepSeek V3.2, GLM-5)", "not computed by Triton"
    ),
    "ungated_experts": KernelTrial(
        "experts without a gate, and experts of a latent (Nemotron 3)", "not computed by Triton"
    ),
    "tiled_recurrence": KernelTrial(
        "recurrent layers whose value heads take turns over key heads (GGUF of Qwen3.5)",
        "not computed by Triton",
    ),
    "gpu_ranks": KernelTrial(
        "ranks on several GPUs, or more than two on one (--tp): two ranks on one H200 are proven", "refused"
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
