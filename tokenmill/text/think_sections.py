"""What opens and closes a model's think section, as its chat template says it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.text.tokenizer import Tokenizer

MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<thinking>", "</thinking>"),
    ("<|channel>thought", "<channel|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)
_LOOK_TOKENS = 4096  # of a prompt's end: an open section begins near it


def markers_in(template: str) -> tuple[str, str] | None:
    """The pair that a template uses; None: it knows no think sections."""
    return next((pair for pair in MARKERS if all(marker in template for marker in pair)), None)


def is_open_at_end(tokenizer: Tokenizer, prompt_ids: Sequence[int], start: str, end: str) -> bool:
    """A prompt may open a section for the model. Told by the text: tokens may join a marker and what follows it."""
    text = tokenizer.decode(prompt_ids[-_LOOK_TOKENS:], skip_special_tokens=False)
    return text.rfind(start) > text.rfind(end)
