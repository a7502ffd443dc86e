"""The resources of a step and of running groups.

    per step           tokens                     granted in parts: a long prompt gets what is left
    per running group  rows, blocks, ...          all that the group needs, or the group waits

A feature with its own limited resource (state slots, adapter slots, encoder tokens) adds a `Resource`; admission and
preemption treat all of them alike.

Of a step's tokens, one is reserved for every running sequence; the rest is for prompt chunks and new groups:

    total:  [ one each for the running sequences not planned yet | available to the sequence being planned ]

So a long prompt gets the surplus and never the token that a decoding sequence needs.

Background requests (`BACKGROUND_PRIORITY` and above: lines of batches) get a share of the tokens, so that they hardly
slow interactive requests down; rows without tokens in a step keep their blocks:

    a prompt of an interactive request is computed     none: its first token does not wait for background requests
    interactive requests exist, or did recently        a small share: the next request waits only for a short step
    no interactive requests                            all tokens

Adapters occupy slots of the runner and stay there when their last group ends, for the next request that uses them. An
adapter used by a running group is never evicted: a group whose adapter finds no slot waits, as for rows and blocks.
The next plan tells the runner about new adapters.

    slots:  [ unused | idle, least recently used | ... | idle, most recently used | used by running groups ]
              ▲ a new adapter gets an unused slot, otherwise the least recently used idle one
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.kv.cache import PrefixMatch
from tokenmill.scheduler.request import SequenceGroup
from tokenmill.types import BACKGROUND_PRIORITY

BACKGROUND_DIVISOR = 16  # background requests get 1/16 of the tokens while there are interactive requests
INTERACTIVE_GRACE_S = 5.0  # interactive requests count as present for this long after the last one ended


class TokenBudget:
    """The tokens of one step."""

    def __init__(self, total: int, num_running: int, for_prompts: Callable[[], int] | None = None) -> None:
        """`for_prompts`: returns the most prompt tokens of the step; called once, for the first prompt."""
        self.left = total
        self._reserved = num_running
        self._for_prompts = for_prompts
        self._prompts_left: int | None = None

    def grant(self, num_wanted: int) -> int:
        """Grant tokens to a running sequence, releasing the one reserved for it."""
        self.unreserve(1)
        return self.spend(num_wanted) if num_wanted <= 1 else self.spend_on_prompt(num_wanted)

    def spend_on_prompt(self, num_wanted: int) -> int:
        """Grant tokens to a sequence that computes several (usually a prompt): at least one if any is left."""
        if self._for_prompts is None:
            return self.spend(num_wanted)
        granted = self.spend(min(num_wanted, max(1, self._prompts())))
        self._prompts_left = self._prompts() - granted
        return granted

    def _prompts(self) -> int:
        if self._prompts_left is None:
            assert self._for_prompts is not None
            self._prompts_left = self._for_prompts()
        return self._prompts_left

    @property
    def has_prompt_tokens(self) -> bool:
        """Tell whether tokens are left for a new group's prompt."""
        return self.spare > 0 and (self._for_prompts is None or self._prompts() > 0)

    def spend(self, num_wanted: int) -> int:
        """Grant as many of the wanted tokens as are neither spent nor reserved."""
        granted = max(0, min(num_wanted, self.left - self._reserved))
        self.left -= granted
        return granted

    def refund(self, num_tokens: int) -> None:
        """Return tokens to the budget that were granted and will not be computed."""
        self.left += num_tokens
        if self._prompts_left is not None and num_tokens > 1:
            self._prompts_left += num_tokens

    @property
    def spare(self) -> int:
        """The number of tokens that could be spent now."""
        return max(0, self.left - self._reserved)

    def unreserve(self, num_sequences: int) -> None:
        self._reserved = max(0, self._reserved - num_sequences)


@dataclass(frozen=True)
class Resource:
    """A limited resource that a group holds from its admission until it ends or is preempted."""

    name: str
    free: Callable[[], int]  # how much a new group could get now
    returning: Callable[[], int]  # how much is free once the steps in flight are applied: held for ended sequences
    needed: Callable[[SequenceGroup, PrefixMatch | None], int]  # to admit a group; None: a lower bound, without a match
    held: Callable[[SequenceGroup], int]  # how much preempting a running group frees


class Resources:
    """All resources that running groups hold."""

    def __init__(self, resources: Sequence[Resource]) -> None:
        self._resources = tuple(resources)

    def first_lacking(self, group: SequenceGroup, match: PrefixMatch | None) -> Resource | None:
        """Return the first resource that is too scarce to admit a group; None if there is none."""
        return next((one for one in self._resources if one.needed(group, match) > one.free()), None)

    def would_suffice(self, group: SequenceGroup, match: PrefixMatch, victims: Sequence[SequenceGroup]) -> bool:
        """Tell whether a group could be admitted once these groups are preempted and the steps in flight applied."""
        return all(
            one.needed(group, match) <= one.free() + one.returning() + sum(map(one.held, victims))
            for one in self._resources
        )


# ── background requests ────────────────────────────────────────────────────────────────────────────────


class BackgroundShare:
    """Counts background and interactive requests, and limits the tokens of background requests."""

    def __init__(self, num_tokens: int, clock: Callable[[], float]) -> None:
        self.num_requests = 0
        self._num_tokens = num_tokens
        self._clock = clock
        self._num_interactive = 0
        self._interactive_ended_s = float("-inf")

    def note_added(self, priority: int) -> None:
        if priority >= BACKGROUND_PRIORITY:
            self.num_requests += 1
        else:
            self._num_interactive += 1

    def note_closed(self, priority: int) -> None:
        if priority >= BACKGROUND_PRIORITY:
            self.num_requests -= 1
        else:
            self._num_interactive -= 1
            self._interactive_ended_s = self._clock()

    def num_tokens(self) -> int:
        """Return the most background tokens of a step that computes no interactive prompt."""
        if self._num_interactive or self._clock() - self._interactive_ended_s < INTERACTIVE_GRACE_S:
            return max(1, self._num_tokens // BACKGROUND_DIVISOR)
        return self._num_tokens


# ── adapters ───────────────────────────────────────────────────────────────────────────────────────────


class ResidentAdapters:
    """The adapters in the runner's slots, and the number of running groups that use each."""

    def __init__(self, num_slots: int) -> None:
        self._unused = list(range(num_slots, 0, -1))  # slots are numbered from 1: 0 is no adapter
        self._slots: OrderedDict[str, int] = OrderedDict()  # by adapter, least recently used first
        self._users: Counter[str] = Counter()  # running groups, by adapter
        self._loads: dict[int, str] = {}  # adapters to load since the last plan, by slot

    def num_free(self) -> int:
        """Return how many slots are unused or could be reused."""
        return len(self._unused) + len(self._slots) - len(self._users)

    def num_needed(self, adapter: str) -> int:
        return int(bool(adapter) and adapter not in self._slots)

    def num_held(self, adapter: str) -> int:
        """Return how many slots become free when one group less uses an adapter."""
        return int(self._users[adapter] == 1) if adapter in self._users else 0

    def acquire(self, adapter: str) -> int:
        """Return the slot of an adapter for one more running group; a free slot must exist."""
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
        """Return (slot, adapter) of the adapters that the runner has to load."""
        loads, self._loads = self._loads, {}
        return list(loads.items())

    def reload(self) -> None:
        """Load the used adapters again and drop the others: the runner may not have received the last plans."""
        for adapter, slot in list(self._slots.items()):
            if adapter in self._users:
                self._loads[slot] = adapter
            else:
                del self._slots[adapter]
                self._loads.pop(slot, None)
                self._unused.append(slot)
