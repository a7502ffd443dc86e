"""How long a prompt may be, and whether and how a request goes on past the context. The shift itself is the
scheduler's (`scheduler/window.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import ContextLengthExceeded, InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.types import ContextShift

MAX_SHIFTED_PROMPT = 1 << 16  # tokens; most of them are only looked at to be forgotten
MAX_CHARACTERS_PER_TOKEN = 64  # more text than this per token of context cannot fit


@dataclass(frozen=True)
class Shifting:
    """What holds for requests that don't say."""

    is_on: bool
    keep: int

    def asked_for(self, params: SamplingParams, context: int) -> ContextShift | None:
        """None: the answer ends where the context does, as it always does for beams."""
        is_on = self.is_on and params.beam is None if params.context_shift is None else params.context_shift
        if not is_on:
            if params.context_keep is not None:
                raise InvalidRequest("context_keep needs context_shift to be on", param="context_keep")
            return None
        keep = min(self.keep, context // 2) if params.context_keep is None else params.context_keep
        if keep > context // 2:
            raise InvalidRequest(
                f"context_keep must be at most half of the context ({context // 2}), got {keep}", param="context_keep"
            )
        return ContextShift(context, keep, drop=max(1, (context - keep) // 2))


NO_SHIFTING = Shifting(is_on=False, keep=4)


def longest_prompt(context: int) -> int:
    """Where the context shifts, for the sake of the time it takes to read it."""
    return max(context, MAX_SHIFTED_PROMPT)


def require_plausible_length(num_characters: int, longest: int, param: str) -> None:
    """Text that cannot fit is refused before it is tokenised, which for megabytes would take seconds."""
    if num_characters > longest * MAX_CHARACTERS_PER_TOKEN:
        raise ContextLengthExceeded(
            f"a prompt of {num_characters} characters does not fit in {longest} tokens",
            param=param,
            hint="shorten the prompt",
        )
