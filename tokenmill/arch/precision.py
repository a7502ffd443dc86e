"""The default precision of a model on a GPU: one rule for the engine and the planner.

              mantissa   largest number   what a residual stream reaches (`docs/experiments/gpu-precision.md`)
    bfloat16    8 bits      3e38
    float16    11 bits     65,504         SmolLM2-135M 27,000, Gemma 3 270M 104,000, 27B 700,000
    float32    24 bits      3e38

Eight bits are what large models are trained and served with. Of a small one they change an answer now and then, where
two tokens are nearly alike, and a GPU has time to spare for it: so a small model has float32, unless it is stored in
bfloat16, when its answers are meant to be those of bfloat16. Float16 would be fine enough, but how far a model's
numbers reach is not to be seen from outside (TinyLlama, of the same family as SmolLM2: 180), so it is taken only for
files that are stored in it, and not for families that are known to leave its range.
"""

from __future__ import annotations

from typing import Literal

from tokenmill.arch.cost import num_parameters
from tokenmill.arch.families import BY_NAME
from tokenmill.arch.outline import Model

ComputeDType = Literal["float32", "bfloat16", "float16"]
SMALL_MODEL_PARAMETERS = 600_000_000  # below, answers change visibly when activations are rounded to 8 bits


def is_small(model: Model) -> bool:
    return num_parameters(model) < SMALL_MODEL_PARAMETERS


def gpu_dtype(model: Model, *, in_halves: bool = False) -> ComputeDType:
    """`in_halves`: 16 bits for small models too, where weights are rounded while they load, or sums of float32 are slow
    (`--deterministic`: an eighth of the speed)."""
    if model.dtype == "bfloat16":
        return "bfloat16"
    if is_small(model) and not in_halves:
        return "float32"
    return "float16" if model.dtype == "float16" and not _exceeds_float16(model) else "bfloat16"


def _exceeds_float16(model: Model) -> bool:
    family = BY_NAME.get(model.family)
    return family is not None and family.exceeds_float16
