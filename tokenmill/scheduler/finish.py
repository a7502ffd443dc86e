"""When a sequence ends: a stop id (not before min_tokens), or its last allowed token.

Stop strings are not here: text is the output processor's business. The id that ended a sequence stays in its tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenmill.types import FinishReason, Request


class Ending(NamedTuple):
    reason: FinishReason
    stop_token_id: int | None = None


def stop_ids(request: Request) -> list[int]:
    """Eos ids (unless ignored) and the user's, without doubles. A grammar that is over always ends with one."""
    is_ignored = request.params.ignore_eos and request.params.guided is None
    eos = [] if is_ignored else request.eos_token_ids
    return list(dict.fromkeys([*eos, *request.params.stop_token_ids]))


def ending_after(request: Request, stops: list[int], token_id: int, num_outputs: int) -> Ending | None:
    """How a sequence ends whose `num_outputs`-th output is `token_id`; None: it goes on."""
    grammar_is_over = request.params.guided is not None and token_id in request.eos_token_ids
    if token_id in stops and (num_outputs >= request.params.min_tokens or grammar_is_over):
        return Ending("stop", token_id)
    if num_outputs >= request.max_tokens:
        return Ending("length")
    return None
