"""Tokens that a request excludes, even where its grammar would write nothing else.

A grammar forces text; the tokens it proposes are only the tokenizer's own cut of it. So a token that is banned, not
among those allowed, biased by -100 (a ban, as OpenAI says) or a stop token before `min_tokens` is not forced: the row
draws from all tokens that begin the same text. The end of a grammar is none of this: it is where the answer ends.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.params import SamplingParams

BAN = -100.0

Objection = Callable[[int, int], bool]  # (token, how many output tokens stand before it)


def no_objection(token_id: int, num_outputs: int) -> bool:
    return False


def objection(params: SamplingParams, stop_token_ids: list[int]) -> Objection:
    allowed, banned = params.allowed_token_ids, {*(params.banned_token_ids or ())}
    banned |= {token_id for token_id, bias in (params.logit_bias or {}).items() if bias <= BAN}
    if allowed is None and not banned and not params.min_tokens:
        return no_objection
    welcome, stops = frozenset(allowed or ()), frozenset(stop_token_ids)

    def objects(token_id: int, num_outputs: int) -> bool:
        is_early_stop = num_outputs < params.min_tokens and token_id in stops
        return is_early_stop or token_id in banned or (allowed is not None and token_id not in welcome)

    return objects
