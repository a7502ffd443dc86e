"""The budget of a step and of its sequences, as a vector of named resources.

    of one step        tokens                     handed out in parts: a long prompt takes what is left
    while a group runs rows, blocks, ...          all that it needs or nothing

A feature that needs room of its own (state slots, adapter slots, encoder tokens) adds a `Resource`; admission and
preemption ask all of them alike.

The tokens of one step are first one for every running sequence, and what is left is for chunks and newcomers:

    total:  [ one each for the running sequences not asked yet | free for the sequence that asks now ]

So a long prompt gets the surplus and never the token that a decoding sequence needs.

Lines of batches (`BACKGROUND_PRIORITY` and more) have a part of the tokens, so that interactive requests hardly notice
them; rows that get nothing in a step keep their place and blocks:

    a prompt of another request is being computed    nothing: its first token does not wait for them
    others are here, or were a moment ago            a small part: the next request waits for a short step only
    no other requests                                everything

Adapters lie in slots of the runner, and stay there when their last group leaves, for the next request that asks for
them. One that a running group uses is never replaced: a group whose adapter has no slot waits, as it does for rows and
blocks. The runner hears of new ones with the next plan, which it carries out behind all plans before.

    slots:  [ unused | idle, used longest ago | ... | idle, used last | used by running groups ]
              ▲ a new adapter goes here: into an unused slot, else over the idle one that was used longest ago
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.kv.cache import PrefixMatch
from tokenmill.scheduler.request import SequenceGroup
from tokenmill.types import BACKGROUND_PRIORITY

PART = 16  # the background's tokens of a step while others are here: one in so many
QUIET_S = 5.0  # others count as here for so long after they left


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
        """Return the tokens that could be spent now."""
        return max(0, self.left - self._reserved)

    def unreserve(self, num_sequences: int) -> None:
        self._reserved = max(0, self._reserved - num_sequences)


@dataclass(frozen=True)
class Resource:
    """Something that a group holds from its admission until it ends or is preempted."""

    name: str
    free: Callable[[], int]  # what a newcomer could have now
    returning: Callable[[], int]  # held by steps in flight for sequences that are gone: free once those are collected
    needed: Callable[[SequenceGroup, PrefixMatch | None], int]  # to admit a group; None: the least, without a match
    held: Callable[[SequenceGroup], int]  # what preempting a running group gives back


class Resources:
    """The resources that running groups hold."""

    def __init__(self, resources: Sequence[Resource]) -> None:
        self._resources = tuple(resources)

    def first_lacking(self, group: SequenceGroup, match: PrefixMatch | None) -> Resource | None:
        """Return the first resource of which too little is free to admit a group."""
        return next((one for one in self._resources if one.needed(group, match) > one.free()), None)

    def would_suffice(self, group: SequenceGroup, match: PrefixMatch, victims: Sequence[SequenceGroup]) -> bool:
        """Tell whether a group could be admitted once these groups are preempted and the steps in flight collected."""
        return all(
            one.needed(group, match) <= one.free() + one.returning() + sum(map(one.held, victims))
            for one in self._resources
        )


# ── background requests ────────────────────────────────────────────────────────────────────────────────


class BackgroundShare:
    """Counts background requests and others, and says how many tokens of a step the former may have."""

    def __init__(self, num_tokens: int, clock: Callable[[], float]) -> None:
        self.num_requests = 0
        self._num_tokens = num_tokens
        self._clock = clock
        self._num_others = 0
        self._others_left_s = float("-inf")

    def note_added(self, priority: int) -> None:
        if priority >= BACKGROUND_PRIORITY:
            self.num_requests += 1
        else:
            self._num_others += 1

    def note_closed(self, priority: int) -> None:
        if priority >= BACKGROUND_PRIORITY:
            self.num_requests -= 1
        else:
            self._num_others -= 1
            self._others_left_s = self._clock()

    def num_tokens(self) -> int:
        """The most tokens of a step that computes no prompt of others."""
        if self._num_others or self._clock() - self._others_left_s < QUIET_S:
            return max(1, self._num_tokens // PART)
        return self._num_tokens


# ── adapters ───────────────────────────────────────────────────────────────────────────────────────────


class ResidentAdapters:
    """The adapters that lie in the runner's slots, and who uses them."""

    def __init__(self, num_slots: int) -> None:
        self._unused = list(range(num_slots, 0, -1))  # slots are numbered from 1: 0 is no adapter
        self._slots: OrderedDict[str, int] = OrderedDict()  # by adapter, the one used longest ago first
        self._users: Counter[str] = Counter()  # running groups
        self._loads: dict[int, str] = {}  # by slot, since the last plan

    def num_free(self) -> int:
        """Slots that an adapter could have which is in none."""
        return len(self._unused) + len(self._slots) - len(self._users)

    def num_needed(self, adapter: str) -> int:
        return int(bool(adapter) and adapter not in self._slots)

    def num_held(self, adapter: str) -> int:
        """Slots that come free when one group less uses an adapter."""
        return int(self._users[adapter] == 1) if adapter in self._users else 0

    def acquire(self, adapter: str) -> int:
        """The slot of an adapter for one more running group; room was checked."""
        if adapter not in self._slots:
            self._slots[adapter] = slot = self._unused.pop() if self._unused else self._evict()
            self._loads[slot] = adapter
        self._slots.move_to_end(adapter)
        self._users[adapter] += 1
        return self._slots[adapter]

    def release(self, adapter: str) -> None:
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]

    def _evict(self) -> int:
        oldest = next(adapter for adapter in self._slots if adapter not in self._users)
        return self._slots.pop(oldest)

    def pop_loads(self) -> list[tuple[int, str]]:
        """(slot, adapter) for those that the runner has yet to load."""
        loads, self._loads = self._loads, {}
        return list(loads.items())

    def reload(self) -> None:
        """Load again what is in use and forget the rest: the runner may not have heard of the last plans."""
        for adapter, slot in list(self._slots.items()):
            if adapter in self._users:
                self._loads[slot] = adapter
            else:
                del self._slots[adapter]
                self._loads.pop(slot, None)
                self._unused.append(slot)
