"""How long a prompt may be, and whether and how a request continues past the end of the context. The shift itself is in
`scheduler/request.py`."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import ContextLengthExceeded, InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.types import ContextShift

MAX_SHIFTED_PROMPT = 1 << 16  # tokens; most of them are only looked at to be forgotten
MAX_CHARACTERS_PER_TOKEN = 64  # more text than this per token of context cannot fit


@dataclass(frozen=True)
class Shifting:
    """The default for requests that don't say whether and how the context shifts."""

    is_on: bool
    keep: int

    def asked_for(self, params: SamplingParams, context: int) -> ContextShift | None:
        """The shift that a request gets; None: its answer ends with the context, as beams always do."""
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
    """The longest prompt where the context shifts: bounded because reading it takes time."""
    return max(context, MAX_SHIFTED_PROMPT)


def prompt_limit(params: SamplingParams, max_context: int, *, shifts_context: bool) -> int:
    """The most tokens that a prompt with these parameters may have; `shifts_context`: the default for parameters that
    don't say."""
    shifts = shifts_context if params.context_shift is None else params.context_shift
    return longest_prompt(max_context) if shifts and params.beam is None else max_context


def require_plausible_length(num_characters: int, longest: int, param: str) -> None:
    """Refuse text that cannot fit before it is tokenised, which takes seconds for megabytes."""
    if num_characters > longest * MAX_CHARACTERS_PER_TOKEN:
        raise ContextLengthExceeded(
            f"a prompt of {num_characters} characters does not fit in {longest} tokens",
            param=param,
            hint="shorten the prompt",
        )
