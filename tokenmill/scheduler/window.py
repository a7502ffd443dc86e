"""What of a sequence lies in the cache once it has outgrown the context.

    tokens:  [ kept | dropped ................... | recent ............ ]
    window:  [ kept | recent ............ ]         at positions 0 ... context - 1

The first tokens stay, since attention rests on them (StreamingLLM calls them sinks); of the others the older half goes
whenever the window is full. What has gone depends on the number of tokens alone: the same tokens have the same window
whether they came as a prompt, were drawn, or are computed again after a preemption.

A new window is computed like a prompt of its own tokens. The keys could be turned to their new positions instead, which
saves that computation, but then what they hold would depend on all that went before: every return from preemption and
every longer prompt would have to go through it again, and no other request could share it. This way a window is a
prompt like any other to the prefix cache, to preemption and to every kind of attention layer.
"""

from __future__ import annotations

from tokenmill.types import ContextShift


def num_dropped(shift: ContextShift, num_tokens: int) -> int:
    """Tokens that have gone from a sequence of `num_tokens`: as many times `drop` as it takes for the rest to fit."""
    surplus = num_tokens - shift.context
    return max(0, -(-surplus // shift.drop) * shift.drop)


def window_of(shift: ContextShift, tokens: list[int], dropped: int) -> list[int]:
    """At most `context` tokens; the last ones are missing while a long prompt is scored window by window."""
    return tokens[: shift.keep] + tokens[shift.keep + dropped : shift.context + dropped]
