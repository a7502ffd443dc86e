"""The sizes of captured steps with prompt chunks and decoding rows, and the models that support them. Pure
arithmetic, no torch: used to plan their memory (`memory.py`) and to capture them (`mixed_graphs.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.arch.spec import Gqa, ModelSpec

SINGLES = (8, 16, 32, 64, 128, 256)  # rows that a step is padded to
CHUNKS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)  # prompt tokens; larger steps need no graph
MAX_PROMPTS = 4  # rows with prompts in a step
# Of prompts that no row decodes beside. With more, computing the padding takes longer than reading the weights, and the
# device as long as the host that launches its kernels.
MAX_ALONE = 256  # prompt tokens


def can_mix(spec: ModelSpec) -> bool:
    """Tell whether a model's steps can be captured independently of the chunks' lengths, because its attention reads
    these on the device."""
    if spec.streams is not None or spec.input_width:
        return False
    if any(layer.side_experts is not None for layer in spec.layers):
        return False
    return all(isinstance(mixer, Gqa) for layer in spec.layers for mixer in layer.mixers)


def singles_for(max_rows: int) -> Sequence[int]:
    """Return the sizes that steps are padded to if at most `max_rows` rows run."""
    return SINGLES[: 1 + sum(size < max_rows for size in SINGLES)]


def mixed_sizes(max_rows: int) -> Sequence[tuple[int, int]]:
    """Return the captured sizes, decoding rows and prompt tokens: those of short chunks first."""
    singles = singles_for(max_rows)
    return [(rows, tokens) for tokens in CHUNKS for rows in ((0, *singles) if tokens <= MAX_ALONE else singles)]


def largest_mixed_step(max_rows: int) -> int:
    """Return the tokens of the largest captured step."""
    return singles_for(max_rows)[-1] + CHUNKS[-1]
