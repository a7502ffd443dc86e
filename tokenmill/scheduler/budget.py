"""What a step and the sequences in it may use, as a vector of named resources.

    of one step        tokens                     handed out in parts: a long prompt takes what is left
    while a group runs rows, blocks, ...          all that it needs or nothing

A feature that needs room of its own (state slots, adapter slots, encoder tokens) adds a `Resource`; admission and
preemption ask all of them alike.

The tokens of one step are first one for every running sequence, and what is left is for chunks and newcomers:

    total:  [ one each for the running sequences not asked yet | free for the sequence that asks now ]

So a long prompt gets the surplus and never the token that a decoding sequence needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.kv.cache import PrefixMatch
from tokenmill.scheduler.request import SequenceGroup


class TokenBudget:
    """The tokens of one step."""

    def __init__(self, total: int, num_running: int, for_prompts: Callable[[], int] | None = None) -> None:
        """`for_prompts`: the most tokens of prompts; asked once, by the first of them."""
        self.left = total
        self._reserved = num_running
        self._for_prompts = for_prompts
        self._prompts_left: int | None = None

    def grant(self, wanted: int) -> int:
        """Give tokens to a running sequence, in exchange for the one reserved for it."""
        self.unreserve(1)
        return self.spend(wanted) if wanted <= 1 else self.spend_on_prompt(wanted)

    def spend_on_prompt(self, wanted: int) -> int:
        """Give tokens to a prompt, or to what else computes several tokens of a sequence: one at least, as long as
        there are any."""
        if self._for_prompts is None:
            return self.spend(wanted)
        granted = self.spend(min(wanted, max(1, self._prompts())))
        self._prompts_left = self._prompts() - granted
        return granted

    def _prompts(self) -> int:
        if self._prompts_left is None:
            assert self._for_prompts is not None
            self._prompts_left = self._for_prompts()
        return self._prompts_left

    @property
    def has_prompt_tokens(self) -> bool:
        """Tell whether a newcomer's prompt could have tokens."""
        return self.spare > 0 and (self._for_prompts is None or self._prompts() > 0)

    def spend(self, wanted: int) -> int:
        """Give as many of the wanted tokens as are neither spent nor reserved."""
        granted = max(0, min(wanted, self.left - self._reserved))
        self.left -= granted
        return granted

    def refund(self, num_tokens: int) -> None:
        """Take back tokens that were granted and will not be fed."""
        self.left += num_tokens
        if self._prompts_left is not None and num_tokens > 1:
            self._prompts_left += num_tokens

    @property
    def spare(self) -> int:
        """What could be spent now."""
        return max(0, self.left - self._reserved)

    def unreserve(self, num_sequences: int) -> None:
        self._reserved = max(0, self._reserved - num_sequences)


@dataclass(frozen=True)
class Resource:
    """Something that a group holds from its admission until it ends or is preempted."""

    name: str
    free: Callable[[], int]  # what a newcomer could have now
    returning: Callable[[], int]  # held by steps in flight for sequences that are gone: free once those are collected
    needed: Callable[[SequenceGroup, PrefixMatch | None], int]  # to admit a group; None: at the least, before a look
    held: Callable[[SequenceGroup], int]  # what preempting a running group gives back


class Resources:
    """All that running groups hold."""

    def __init__(self, resources: Sequence[Resource]) -> None:
        self._resources = tuple(resources)

    def first_lacking(self, group: SequenceGroup, match: PrefixMatch | None) -> Resource | None:
        """The first resource of which too little is free to admit a group."""
        return next((one for one in self._resources if one.needed(group, match) > one.free()), None)

    def would_suffice(self, group: SequenceGroup, match: PrefixMatch, victims: Sequence[SequenceGroup]) -> bool:
        """Tell whether a group could be admitted once these groups are preempted and the steps in flight collected."""
        return all(
            one.needed(group, match) <= one.free() + one.returning() + sum(map(one.held, victims))
            for one in self._resources
        )
