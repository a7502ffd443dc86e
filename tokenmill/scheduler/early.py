"""What the next step computes whatever comes of this one: it can be started before this one is done.

A prompt depends on no token that is drawn. So while a device computes a step, the next chunks of unfinished prompts,
and behind them waiting prompts, are planned already, within what the budget leaves when everyone else has a token:

    this step:   [ a token each | chunk ... ]                        on the device
    next step:   [ a token each | rest of the chunk, newcomers ]
                   planned when    └ planned early, started at once
                   this is done
"""

from __future__ import annotations

from tokenmill.scheduler.budget import TokenBudget
from tokenmill.scheduler.draft import Draft, Planned
from tokenmill.scheduler.job import Gang
from tokenmill.types import RowPlan

WORTH_A_PASS = 8  # of a step's tokens, an eighth


class EarlyRows:
    """Of the next step, by gang; each is of one sequence."""

    def __init__(self) -> None:
        self._rows: dict[Gang, tuple[Planned, RowPlan]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, gang: Gang) -> bool:
        return gang in self._rows

    @property
    def gangs(self) -> list[Gang]:
        return list(self._rows)

    def keep(self, draft: Draft) -> None:
        for planned, row in draft.pairs:
            self._rows[planned.sequence.job.gang_of(planned.sequence)] = planned, row

    def drop(self, gang: Gang) -> None:
        """It left the floor: nobody wants to know what comes of its row."""
        self._rows.pop(gang, None)

    def budget(self, num_tokens: int, num_running: int) -> TokenBudget:
        """What they leave of a step's"""
        taken = sum(planned.num_tokens for planned, _ in self._rows.values())
        return TokenBudget(num_tokens - taken, num_running - len(self._rows))

    def least_to_add(self, num_tokens: int) -> int:
        """Tokens that are worth a pass of their own beside the one that has begun"""
        return num_tokens // WORTH_A_PASS if self._rows else 0

    def join(self, draft: Draft) -> None:
        """They become rows of the step like all others."""
        for planned, row in self._rows.values():
            draft.repeat(planned, row)
        self._rows = {}


def is_plain(gang: Gang) -> bool:
    """One sequence that draws on its own, from its prompt's last token on, and of whose prompt nothing is asked."""
    job, params = gang.job, gang.job.request.params
    is_alone = len(gang.members) == 1 and not gang.unborn and not job.delivery.holds_back
    is_asked = params.prompt_logprobs is not None or params.guided is not None
    return is_alone and job.draws_tokens and not is_asked and job.request.shift is None


def is_last_draw(planned: Planned) -> bool:
    """Its sequence draws the last token that was asked for, and is gone when the step is done."""
    sequence, num_tokens, _ = planned
    job = sequence.job
    draws = sequence.is_whole and sequence.computed + num_tokens == len(sequence.window)
    return draws and is_plain(job.gang_of(sequence)) and sequence.num_outputs + 1 >= job.request.max_tokens


def names_underway(planned: list[Planned], block_size: int) -> set[bytes]:
    """Of full blocks that are being computed: who begins with one had better wait until it is in the cache."""
    found: set[bytes] = set()
    for sequence, num_tokens, _ in planned:
        first, last = sequence.computed // block_size, (sequence.computed + num_tokens) // block_size
        found.update(sequence.chain.names[first:last])
    return found
