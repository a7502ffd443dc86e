"""A job is a request being worked on; a gang is what is admitted, planned and preempted as one.

Samples of one prompt (`n`) are independent once the prompt is computed: each is a gang of one. Beams choose
their next tokens together, so they are one gang. Either way the prompt is computed once: the first member computes
all of it but the last token, then the unborn ones fork from it, and each computes the last prompt token itself.

    leader:    [ prompt without its last token ][ last ][ outputs ...
    siblings:    shared blocks ─────────────────┴[ last ][ outputs ...
"""

from __future__ import annotations

from typing import Protocol

from tokenmill.scheduler.finish import stop_ids
from tokenmill.scheduler.sequence import Sequence
from tokenmill.types import Request, RowResult, SequenceOutput, TokenLogprobs


class OutputMode(Protocol):
    """How drawn tokens become outputs: at once, or held back until the best are known."""

    num_logprobs: int | None  # what the runner is asked for with each drawn token
    holds_back: bool  # outputs come at the end only, numbered by rank

    def take(self, sequence: Sequence, result: RowResult) -> list[SequenceOutput]:
        """The sequence's tokens are all computed and this is what came of it; marks it finished when it is."""
        ...


class RequestState:
    def __init__(self, request: Request, number: int) -> None:
        self.request = request
        self.number = number  # first come, first served
        self.groups: list[SequenceGroup] = []
        self.stop_token_ids = stop_ids(request)
        self.output_mode: OutputMode  # set by whoever builds the job, once the sequences exist
        self.prompt_logprobs: list[TokenLogprobs] = []  # entry i belongs to prompt position i + 1
        self.num_cached_tokens = 0
        self.queue_s: float | None = None  # None: not scheduled yet

    @property
    def num_sequences(self) -> int:
        return 1 if self.request.pooling else self.request.params.num_sequences

    @property
    def draws_tokens(self) -> bool:
        return self.request.pooling is None and self.request.max_tokens > 0

    @property
    def is_shareable(self) -> bool:
        """Pooling over all positions may mean attention in both directions, whose blocks fit no other prompt."""
        return self.request.pooling is None or self.request.pooling.kind == "last"

    @property
    def may_reuse_prefix(self) -> bool:
        """Not where every position must be computed: prompt logprobs and vectors pooled over positions."""
        return self.is_shareable and not self.wants_prompt_logprobs

    @property
    def wants_prompt_logprobs(self) -> bool:
        asked = self.request.params.prompt_logprobs is not None
        return asked and self.num_scored < len(self.request.prompt_token_ids) - 1

    @property
    def num_scored(self) -> int:
        """Prompt tokens that have their logprobs; the first one never gets any."""
        return len(self.prompt_logprobs)

    def lacks_prompt_logprobs(self, end: int) -> bool:
        """Tokens before place `end` predict prompt tokens that have no logprobs yet."""
        return self.wants_prompt_logprobs and end > self.num_scored

    def keep_prompt_logprobs(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Those of places start+1 ...; what a recomputed chunk repeats is dropped."""
        self.prompt_logprobs.extend(logprobs[self.num_scored - start :])

    def group_of(self, sequence: Sequence) -> SequenceGroup:
        assert sequence.group is not None, "every sequence of a job belongs to a gang"
        return sequence.group

    def open_sequence(self, index: int) -> Sequence | None:
        open_ones = (sequence for group in self.groups for sequence in [*group.members, *group.pending_forks])
        return next((sequence for sequence in open_ones if sequence.index == index), None)

    def open_indices(self) -> list[int]:
        """Indices that the reader has not seen the end of."""
        if self.output_mode.holds_back:
            return list(range(self.request.params.n))
        return sorted(sequence.index for group in self.groups for sequence in [*group.members, *group.pending_forks])


class SequenceGroup:
    __slots__ = (
        "is_gone",
        "is_running",
        "key",
        "members",
        "num_rows",
        "pending_forks",
        "refused_room",
        "spare_rows",
        "state",
    )

    def __init__(
        self, state: RequestState, members: list[Sequence], pending_forks: list[Sequence], num_rows: int
    ) -> None:
        self.state = state
        self.members = members
        self.pending_forks = pending_forks  # wait for members[0] to compute the prompt they share
        self.num_rows = num_rows  # needed to run at all
        self.spare_rows: list[int] = []  # held for the unborn, and for beams yet to branch
        self.key = (state.request.priority, state.number, members[0].index)
        self.is_gone = False
        self.is_running = False
        self.refused_room = -1  # free blocks (less the margin) when it was last refused
        state.groups.append(self)
        for sequence in [*members, *pending_forks]:
            sequence.group = self

    @property
    def priority(self) -> int:
        """Smaller runs first."""
        return self.key[0]

    @property
    def leader(self) -> Sequence:
        return self.members[0]

    def target(self, sequence: Sequence) -> int:
        """How far a sequence may compute its window now: a leader stops where its siblings fork."""
        if self.pending_forks and sequence.is_whole:
            return len(sequence.window) - sequence.num_outputs - 1
        return len(sequence.window)

    def wants(self, sequence: Sequence) -> int:
        return self.target(sequence) - sequence.computed

    def fold(self) -> None:
        """Back to one member: the others will fork from it again."""
        self.pending_forks = self.members[1:] + self.pending_forks
        self.members = self.members[:1]

    def forget(self, sequence: Sequence) -> None:
        """One of several samples is given up before they part."""
        if sequence in self.members:
            self.members.remove(sequence)
        else:
            self.pending_forks.remove(sequence)
        if not self.members:
            self.members = [self.pending_forks.pop(0)]
        self.num_rows -= 1
