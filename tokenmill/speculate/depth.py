"""How many guesses are worth computing in one step: the number that brings most tokens a second.

Each guess is right with some chance (all before it right too), so the surest ones of all sequences go first. With m of
them a step brings  rows + Σ chance  tokens and takes what a step of so many tokens takes.

    tokens a second │     ●   ●
                    │  ●          ●          drafts pay up to the top
                    │●               ●
                    └──────────────────── m
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenmill.speculate.step_cost import StepCost

MAX_DRAFTS = 15  # of one sequence in one step
NEGLIGIBLE = 0.05  # chances below are not worth a look
MIN_CHANCE = 0.3  # `Eager` feeds guesses that are at least this likely
CAUTION = 1.15  # drafts are reckoned dearer than they seem, since promises err
PROBE_DEPTH = 2
FIRST_PATIENCE, LONGEST_PATIENCE = 16, 1024  # steps without drafts before the next look


class Depth(Protocol):
    def least_chance(self, num_rows: int, num_tokens: int) -> float:
        """Guesses less likely than this are fed in no case: nobody need reckon further."""
        ...

    def choose(self, chances: Sequence[Sequence[float]], num_rows: int, num_tokens: int) -> list[int]:
        """How many guesses of each sequence to feed. chances[i][j]: that guesses 0 to j of sequence i are all right.

        The step draws for `num_rows` sequences and feeds `num_tokens` tokens besides the guesses.
        """
        ...


class ThresholdDepth:
    """All that are likely enough, whatever they cost."""

    def __init__(self, least_chance: float = MIN_CHANCE) -> None:
        self._least = least_chance

    def least_chance(self, num_rows: int, num_tokens: int) -> float:
        return self._least

    def choose(self, chances: Sequence[Sequence[float]], num_rows: int, num_tokens: int) -> list[int]:
        return [sum(chance >= self._least for chance in one) for one in chances]


class CostModelDepth:
    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def least_chance(self, num_rows: int, num_tokens: int) -> float:
        """Half of where a token more would cost as much as it brings, were all sizes on the line."""
        if not self._cost.is_known:
            return 1.0
        return max(NEGLIGIBLE, 0.5 * self._cost.slope * num_rows / self._cost.seconds(num_tokens))

    def choose(self, chances: Sequence[Sequence[float]], num_rows: int, num_tokens: int) -> list[int]:
        if not self._cost.is_known:
            return [0] * len(chances)
        surest = sorted((chance for one in chances for chance in one), reverse=True)
        costs = self._cost.seconds_up_to(num_tokens, len(surest))
        base = costs[0]
        best, least, gained = num_rows / base, 2.0, float(num_rows)
        for chance, seconds in zip(surest, costs[1:], strict=True):
            gained += chance
            found = gained / (base + CAUTION * (seconds - base))
            if found > best:
                best, least = found, chance
        return [sum(chance >= least for chance in one) for one in chances]


class DraftDepth:
    """The same question where guesses cost the draft model's steps: one depth for all sequences, since they are drafted
    for together. When none pays, now and then a short draft shows whether that is still so, ever more rarely."""

    def __init__(self, cost: StepCost, draft_cost: StepCost) -> None:
        self._cost = cost
        self._draft_cost = draft_cost
        self._patience = FIRST_PATIENCE
        self._num_waited = 0

    def choose(self, chances: Sequence[Sequence[float]], num_rows: int, num_tokens: int, num_behind: int) -> int:
        """`num_behind`: tokens that the draft model feeds before it can guess."""
        best = self._best(chances, num_rows, num_tokens, num_behind)
        if best:
            self._patience, self._num_waited = FIRST_PATIENCE, 0
            return best
        self._num_waited += 1
        if self._num_waited < self._patience:
            return 0
        self._patience, self._num_waited = min(2 * self._patience, LONGEST_PATIENCE), 0
        return PROBE_DEPTH

    def _best(self, chances: Sequence[Sequence[float]], num_rows: int, num_tokens: int, num_behind: int) -> int:
        if not self._cost.is_known or not self._draft_cost.is_known:
            return PROBE_DEPTH
        base = self._cost.seconds(num_tokens)
        best, rate = 0, num_rows / base
        gained, fed, drafting_s = float(num_rows), num_tokens, 0.0
        for depth in range(1, max(map(len, chances), default=0) + 1):
            going = [one[depth - 1] for one in chances if len(one) >= depth]
            drafting_s += self._draft_cost.seconds(num_behind if depth == 1 else len(going))
            gained += sum(going)
            fed += len(going)
            found = gained / (base + CAUTION * (drafting_s + self._cost.seconds(fed) - base))
            if found > rate:
                best, rate = depth, found
        return best
