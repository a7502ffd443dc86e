"""The cost model and what it decides, on machines that are made up."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from tokenmill.speculate.depth import MAX_PROBE_INTERVAL, CostModelDepth, DraftDepth, StepCost, ThresholdDepth
from tokenmill.speculate.draft_state import FIRST_RATES, AcceptanceRates, RequestAcceptance, length_class

Machine = Callable[[int], float]
MEMORY_BOUND: Machine = lambda tokens: 0.050 + 0.0002 * tokens  # noqa: E731  # a line of a table
SMALL_CPU: Machine = lambda tokens: 0.006 + 0.0014 * tokens  # noqa: E731
COMPUTE_BOUND: Machine = lambda tokens: 0.0005 + 0.005 * tokens  # noqa: E731
TILES: Machine = lambda tokens: 0.013 + 0.003 * min(tokens, 8) if tokens <= 8 else 0.034  # noqa: E731


def learned(machine: Machine, sizes: list[int], noise: float = 0.1, rounds: int = 40) -> StepCost:
    rng = random.Random(1)
    cost = StepCost()
    for _ in range(rounds):
        for size in sizes:
            hiccup = 20.0 if rng.random() < 0.02 else 1.0
            cost.note(size, machine(size) * hiccup * rng.uniform(1.0, 1.0 + noise))
    return cost


@pytest.mark.parametrize("machine", [MEMORY_BOUND, SMALL_CPU, COMPUTE_BOUND])
def test_costs_of_sizes_never_seen_are_on_the_line(machine: Machine) -> None:
    cost = learned(machine, [1, 4, 9, 40])
    for size in (1, 2, 6, 12, 16, 30):
        assert cost.seconds(size) == pytest.approx(machine(size) * 1.05, rel=0.25), size


def test_sizes_that_were_seen_keep_their_own_cost() -> None:
    cost = learned(TILES, [1, 4, 8, 12, 16])
    assert cost.seconds(8) == pytest.approx(TILES(8) * 1.05, rel=0.15)
    assert cost.seconds(16) == pytest.approx(TILES(16) * 1.05, rel=0.15)


@pytest.mark.parametrize("first", [1, 7, 16, 90, 300])
def test_costs_asked_for_at_once_are_those_asked_for_singly(first: int) -> None:
    cost = learned(TILES, [1, 4, 8, 12, 16, 30, 60, 200])
    for more in (0, 1, 9, 120):
        singly = [cost.seconds(first + count) for count in range(more + 1)]
        assert cost.seconds_up_to(first, more) == pytest.approx(singly, rel=1e-12)


def test_a_machine_that_changes_is_learned_again() -> None:
    cost = learned(SMALL_CPU, [1, 5])
    for _ in range(40):
        cost.note(1, 10 * SMALL_CPU(1))
    assert cost.seconds(1) > 5 * SMALL_CPU(1)


def test_nothing_is_drafted_before_a_step_was_timed() -> None:
    assert CostModelDepth(StepCost()).choose([[0.9, 0.8]], 1, 1) == [0]


def test_sure_guesses_pay_where_weights_are_read_and_not_where_arithmetic_counts() -> None:
    sure = [[0.95**place for place in range(1, 16)]]
    assert CostModelDepth(learned(MEMORY_BOUND, [1, 4])).choose(sure, 1, 1)[0] >= 12
    assert CostModelDepth(learned(SMALL_CPU, [1, 4])).choose(sure, 1, 1)[0] >= 5
    likely = [[0.8**place for place in range(1, 16)]]
    assert CostModelDepth(learned(COMPUTE_BOUND, [1, 4])).choose(likely, 1, 1) == [0]


def test_a_full_batch_takes_only_the_surest() -> None:
    depth = CostModelDepth(learned(SMALL_CPU, [1, 4, 16, 24]))
    chances = [[0.97, 0.94]] + [[0.3, 0.1]] * 15
    assert depth.choose(chances, 16, 16) in ([2] + [0] * 15, [1] + [0] * 15)
    assert depth.choose([[0.3, 0.1]] * 16, 16, 16) == [0] * 16


@pytest.mark.parametrize("machine", [MEMORY_BOUND, SMALL_CPU, TILES])
def test_the_choice_is_near_the_best_there_is(machine: Machine) -> None:
    """Against all depths tried on the machine itself."""
    depth = CostModelDepth(learned(machine, [1, 2, 4, 8, 12, 16], noise=0.02))
    for chance in (0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97):
        chances = [chance**place for place in range(1, 16)]
        rates = [(1 + sum(chances[:count])) / machine(1 + count) for count in range(16)]
        chosen = depth.choose([chances], 1, 1)[0]
        assert rates[chosen] >= 0.8 * max(rates), (chance, chosen, rates)
        assert rates[chosen] >= 0.99 * rates[0], "slower than without"


def test_eager_takes_what_is_likely() -> None:
    assert ThresholdDepth(0.3).choose([[0.9, 0.5, 0.2], [], [0.1]], 3, 3) == [2, 0, 0]


def test_a_draft_model_must_pay_for_its_own_steps() -> None:
    target = learned(lambda tokens: 0.1 + 0.001 * tokens, [1, 4, 8])
    good = [[0.8**place for place in range(1, 9)]]
    quick = DraftDepth(target, learned(lambda tokens: 0.005 + 0.0001 * tokens, [1, 2, 8]))
    slow = DraftDepth(target, learned(lambda tokens: 0.1 + 0.001 * tokens, [1, 2, 8]))
    assert quick.choose(good, 1, 1, 2) >= 4
    assert slow.choose(good, 1, 1, 2) == 0


def test_a_draft_model_that_does_not_pay_is_tried_ever_more_rarely() -> None:
    depth = DraftDepth(learned(SMALL_CPU, [1, 4]), learned(SMALL_CPU, [1, 4]))
    tried = [number for number in range(6000) if depth.choose([[0.2, 0.04]], 1, 1, 1)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert 4 < len(tried) < 16 and gaps == sorted(gaps) and max(gaps) <= MAX_PROBE_INTERVAL


def test_rates_follow_what_is_seen() -> None:
    guesses = AcceptanceRates()
    assert [guesses.rate(kind) for kind in range(5)] == list(FIRST_RATES)
    for number in range(600):
        guesses.learn(0, number % 10 == 0)
    assert guesses.rate(0) == pytest.approx(0.1, abs=0.03)
    for _ in range(600):
        guesses.learn(0, True)
    assert guesses.rate(0) > 0.8, "what was long ago counts less"


def test_a_request_that_repeats_itself_is_trusted_and_one_that_does_not_is_not() -> None:
    good, bad = RequestAcceptance(), RequestAcceptance()
    assert good.chance(0.5) == pytest.approx(0.5)
    for _ in range(20):
        good.learn(0.5, True)
        bad.learn(0.5, False)
    assert good.chance(0.5) > 0.85 and bad.chance(0.5) < 0.15


def test_longer_agreements_are_of_higher_kinds() -> None:
    kinds = [length_class(length) for length in range(2, 30)]
    assert kinds == sorted(kinds) and set(kinds) == set(range(len(FIRST_RATES)))
