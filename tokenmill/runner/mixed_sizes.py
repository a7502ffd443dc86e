"""Sizes of captured steps of chunks beside decoding rows, and the models that have such. Pure arithmetic, no torch:
their memory is planned by it (`memory.py`), and they are captured by it (`mixed_graphs.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.arch.spec import Gqa, MlpSpec, ModelSpec

SINGLES = (8, 16, 32, 64, 128, 256)  # rows that a step is padded to
CHUNKS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)  # tokens of prompts; with more the host is fast enough
MAX_PROMPTS = 4  # rows of prompts in a step


def can_mix(spec: ModelSpec) -> bool:
    """Tell whether steps of a model can be captured whatever the lengths of its chunks: its attention looks them up on
    the device."""
    if spec.streams is not None or spec.input_width:
        return False
    return all(isinstance(layer.mlp, MlpSpec) and layer.side_experts is None for layer in spec.layers) and all(
        isinstance(mixer, Gqa) for layer in spec.layers for mixer in layer.mixers
    )


def singles_for(max_rows: int) -> Sequence[int]:
    """The sizes that steps are padded to where so many rows run at most."""
    return SINGLES[: 1 + sum(size < max_rows for size in SINGLES)]


def largest_mixed_step(max_rows: int) -> int:
    """Return the tokens of the largest captured step."""
    return singles_for(max_rows)[-1] + CHUNKS[-1]
