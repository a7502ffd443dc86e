"""Lanes: the steps that a pipeline computes at the same time, on different stages.

A sequence whose next token depends on a step in flight waits for it, so a step with all sequences would leave the other
stages idle. Instead, each step takes its share of the running sequences:

    12 sequences, 3 lanes     step 1 [ a b c d ]   step 2 [ e f g h ]   step 3 [ i j k l ]   step 4 [ a b c d ] ...

Sequences are not bound to a lane: a step takes those that are not in flight, in order, up to the current share, so that
lanes stay balanced when sequences start and end. The chunks of a long prompt may be in flight in consecutive steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.scheduler.request import SequenceGroup


@dataclass(frozen=True)
class Lanes:
    number: int
    max_rows: int  # over all lanes
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """The token budget of one step."""
        return -(-self.max_tokens // self.number)

    def share(self, num_running: int, num_waiting: int) -> int:
        """Return how many sequences one step takes; at least one."""
        return max(1, -(-min(self.max_rows, num_running + num_waiting) // self.number))

    def num_reserved(self, groups: Sequence[SequenceGroup], share: int) -> int:
        """Return how many tokens a step reserves: one for each sequence that it can take now."""
        num_free = sum(group.wants(sequence) > 0 for group in groups for sequence in group.members)
        return min(share, num_free, self.num_tokens)
