"""How many draft tokens to verify in one step: the number that gives the most tokens per second.

Each draft token has a probability that it and all before it are right; the most likely ones of all sequences go first.
A step with m of them yields  rows + Σ probability  tokens and takes the time of a step of that many tokens.

    tokens a second │     ●   ●
                    │  ●          ●          drafts pay up to the top
                    │●               ●
                    └──────────────────── m
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenmill.speculate.step_cost import StepCost

MAX_DRAFTS = 15  # per sequence and step
NEGLIGIBLE = 0.05  # probabilities below this are not considered
MIN_CHANCE = 0.3  # `ThresholdDepth` feeds draft tokens that are at least this likely
CAUTION = 1.15  # drafts are counted as this much dearer than estimated, since estimates err
PROBE_DEPTH = 2
FIRST_PATIENCE, LONGEST_PATIENCE = 16, 1024  # steps without drafts before the next probe


class Depth(Protocol):
    """A rule for how many draft tokens each sequence gets."""

    def least_chance(self, num_rows: int, num_tokens: int) -> float:
        """The probability below which no draft token is fed, so that proposers can stop there."""
        ...

    def choose(self, chances: Sequence[Sequence[float]], num_rows: int, num_tokens: int) -> list[int]:
        """Choose how many draft tokens of each sequence to feed.

        chances[i][j] is the probability that drafts 0 to j of sequence i are all right. The step samples for
        `num_rows` sequences and feeds `num_tokens` tokens besides the drafts.
        """
        ...


class ThresholdDepth:
    """Every draft token that is likely enough, whatever it costs."""

    def __init__(self, least_chance: float = MIN_CHANCE) -> None:
        self._least = least_chance

    def least_chance(self, num_rows: int, num_tokens: int) -> float:
        return self._least

    def choose(self, chances: Sequence[Sequence[float]], num_rows: int, num_tokens: int) -> list[int]:
        return [sum(chance >= self._least for chance in one) for one in chances]


class CostModelDepth:
    """As many draft tokens as raise the tokens per second, by the measured cost of steps."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def least_chance(self, num_rows: int, num_tokens: int) -> float:
        """Half the probability at which one more token costs what it brings, by the fitted line alone."""
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
    """One depth for all sequences, since the draft model drafts for them together and its steps cost time too.

    While no draft pays, a short draft now and then, ever more rarely, shows whether that is still so."""

    def __init__(self, cost: StepCost, draft_cost: StepCost) -> None:
        self._cost = cost
        self._draft_cost = draft_cost
        self._patience = FIRST_PATIENCE
        self._num_waited = 0

    def choose(self, chances: Sequence[Sequence[float]], num_rows: int, num_tokens: int, num_behind: int) -> int:
        """Choose the depth; `num_behind` tokens must be fed to the draft model before it can draft."""
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
