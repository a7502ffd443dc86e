"""Drafts in the scheduler: fewer steps, the same tokens, nobody pushed out, nothing wrong in the prefix cache."""

from __future__ import annotations

import pytest

from tests.support.random_drafter import RandomDrafter
from tests.support.simulated_runner import EOS, SimulatedRunner, expected_tokens
from tokenmill.config.engine import SchedulerConfig
from tokenmill.kv.cache import KVCache
from tokenmill.params import SamplingParams
from tokenmill.scheduler import Scheduler
from tokenmill.scheduler.speculation import NO_DRAFTS, Drafter, num_accepted_drafts
from tokenmill.types import Request, SequenceOutput


def make(drafter: Drafter, num_blocks: int = 200, token_budget: int = 64) -> tuple[Scheduler, SimulatedRunner]:
    cache = KVCache(windows=[None], num_blocks=num_blocks, block_size=4)
    config = SchedulerConfig(max_running=8, token_budget=token_budget)
    scheduler = Scheduler(config=config, cache=cache, max_rows=8, clock=lambda: 0.0, drafter=drafter)
    return scheduler, SimulatedRunner(cache)


def ask(number: int, max_tokens: int = 40, **params: object) -> Request:
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=[7, 8, 9, number],
        params=SamplingParams(ignore_eos=True, **params),  # type: ignore[arg-type]
        eos_token_ids=[EOS],
        max_tokens=max_tokens,
        seed=number,
    )


def run(scheduler: Scheduler, runner: SimulatedRunner, requests: list[Request]) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    while (plan := scheduler.plan()) is not None:
        for output in scheduler.apply(runner.run(plan)):
            outputs[output.request_id].append(output)
        scheduler.check_integrity()
    return outputs


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_drafts_change_steps_and_no_token(wrong: float) -> None:
    requests = [ask(number) for number in range(5)]
    scheduler, runner = make(RandomDrafter(1, wrong))
    outputs = run(scheduler, runner, requests)
    for request in requests:
        assert tokens(outputs[request.request_id]) == expected_tokens(request, 0)
    plain, plain_runner = make(NO_DRAFTS)
    run(plain, plain_runner, requests)
    stats = scheduler.stats()
    assert stats.drafted_tokens > 0
    if wrong == 0.0:
        assert stats.accepted_tokens == stats.drafted_tokens
        assert stats.steps * 2 < plain.stats().steps
    else:
        assert stats.accepted_tokens < stats.drafted_tokens


def test_a_sequence_says_how_many_drafts_it_had() -> None:
    scheduler, runner = make(RandomDrafter(2, 0.3))
    last = run(scheduler, runner, [ask(1)])["r1"][-1]
    stats = scheduler.stats()
    assert (last.num_drafted, last.num_accepted) == (stats.drafted_tokens, stats.accepted_tokens)
    assert last.num_drafted > last.num_accepted > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_drafts_end_where_the_answer_must(max_tokens: int) -> None:
    scheduler, runner = make(RandomDrafter(3, 0.0))
    outputs = run(scheduler, runner, [ask(1, max_tokens)])["r1"]
    assert len(tokens(outputs)) == max_tokens and outputs[-1].finish_reason == "length"


def test_a_stop_id_among_right_drafts_ends_the_answer() -> None:
    request = ask(4)
    stop = expected_tokens(request, 0)[9]
    request = ask(4, stop_token_ids=[stop])
    scheduler, runner = make(RandomDrafter(5, 0.0))
    outputs = run(scheduler, runner, [request])["r4"]
    assert tokens(outputs) == expected_tokens(request, 0)
    assert outputs[-1].stop_token_id == stop


def test_nobody_is_preempted_for_drafts() -> None:
    """Exactly the blocks that two sequences need: drafts find no room and do without."""
    requests = [ask(number, 40) for number in (1, 2)]
    scheduler, runner = make(RandomDrafter(6, 0.0), num_blocks=1 + 2 * 11)
    outputs = run(scheduler, runner, requests)
    assert scheduler.stats().preemptions == 0
    for request in requests:
        assert tokens(outputs[request.request_id]) == expected_tokens(request, 0)


def test_the_budget_holds_drafts_too() -> None:
    scheduler, runner = make(RandomDrafter(7, 0.0), token_budget=8)
    for number in range(6):
        scheduler.add(ask(number))
    while (plan := scheduler.plan()) is not None:
        assert plan.num_tokens <= 8
        scheduler.apply(runner.run(plan))


def test_accepted_tokens_are_found_by_the_next_prompt_and_wrong_ones_are_not() -> None:
    scheduler, runner = make(RandomDrafter(8, 0.2))
    first = ask(1, 41)
    answer = tokens(run(scheduler, runner, [first])["r1"])
    follow_up = Request(
        request_id="next",
        prompt_token_ids=first.prompt_token_ids + answer + [5],
        params=SamplingParams(ignore_eos=True),
        max_tokens=4,
        seed=9,
    )
    outputs = run(scheduler, runner, [follow_up])["next"]  # the runner checks every cell that is read
    assert outputs[-1].num_cached_tokens == (len(first.prompt_token_ids) + 40) // 4 * 4
    assert tokens(outputs) == expected_tokens(follow_up, 0)


def test_num_right() -> None:
    assert num_accepted_drafts([1, 2, 3], [1, 2, 3, 4]) == 3
    assert num_accepted_drafts([1, 2, 3], [1, 2, 9]) == 2
    assert num_accepted_drafts([1, 2, 3], [1, 2]) == 1  # the second was drawn last: it has to be computed again
    assert num_accepted_drafts([1, 2, 3], [9]) == 0
    assert num_accepted_drafts([], [9]) == 0
