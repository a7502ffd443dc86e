"""Where passing ends, by all trials of a search together.

More load is never easier, so behind the noise there is one edge: levels below it pass, levels above it fail, and the
closer to it the more a single trial is luck (a machine that was slow or fast for some seconds). Neither the edge nor
the width of that luck is known; both are inferred from the trials, on a grid, with Bayes' rule:

    P(a level passes) = logistic(log(edge / level) / width), and one trial in a hundred goes wrong for no reason

    level      30   36   40   44   48   52   60
    trials     ✓✓   ✓✓   ✓✗   ✓✓   ✗✓   ✗✗   ✗        believed: 44 to 48 with width 0.1; nothing is sure below that

A server whose trials never contradict each other is believed after a few of them; where they do, more are needed,
however often one looks. (Counting majorities, or resampling the trials, is surer than it is right: a search that ends
when it looks sure ends at a lucky moment.)
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.bench.measures import Floats

Outcome = tuple[float, bool]  # level, whether it passed

STEP = 0.006  # of the grid, as a share
WIDTHS = np.array([0.003, 0.006, 0.012, 0.025, 0.04, 0.06, 0.09, 0.13, 0.18, 0.25])
SLIP = 0.01
MARGIN = 1.5  # the edge may lie this factor outside of what may be tried


@dataclass(frozen=True)
class Belief:
    """Edges and how probable each is; the probabilities add up to one."""

    edges: Floats
    chances: Floats

    def quantile(self, share: float) -> float:
        place = int(np.searchsorted(np.cumsum(self.chances), share))
        return float(self.edges[min(place, len(self.edges) - 1)])

    def between(self, low: float, high: float) -> float:
        return float(self.chances[(self.edges >= low) & (self.edges < high)].sum())

    def drawn(self, drawing: random.Random) -> float:
        return self.quantile(drawing.random())


def belief_of(outcomes: Sequence[Outcome], lowest: float, most: float) -> Belief:
    """Before any trial every edge (on a scale of shares) and every width is as probable as another."""
    logs = np.arange(np.log(lowest / MARGIN), np.log(most * MARGIN), STEP)
    likelihood = np.zeros((len(WIDTHS), len(logs)))
    for (level, passed), times in Counter(outcomes).items():
        distance = (logs - np.log(level)) / WIDTHS[:, None]
        chance = 0.5 * (1 + np.tanh(distance / 2))  # the logistic function, without overflow
        chance = SLIP + (1 - 2 * SLIP) * chance
        likelihood += times * np.log(chance if passed else 1 - chance)
    weights = np.exp(likelihood - likelihood.max()).sum(axis=0)
    return Belief(np.exp(logs), weights / weights.sum())
