"""Sequences longer than the context, in the scheduler: which tokens are in the cache when, and at what price."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.scheduler_bench import SchedulerBench, ask, tokens_of
from tests.support.simulated_runner import expected_prompt_logprobs, expected_tokens, in_sight
from tokenmill.scheduler.request import mixed_seed, num_dropped, window_of
from tokenmill.types import ContextShift, Request

SHIFT = ContextShift(context=16, keep=3, drop=6)


def shifting(bench: SchedulerBench, name: str, prompt_len: int, max_tokens: int, **params: object) -> Request:
    request = msgspec.structs.replace(ask(name, prompt_len, max_tokens, **params), shift=SHIFT)
    bench.runner.shifts |= {mixed_seed(request.seed, index): SHIFT for index in range(request.params.n)}
    bench.scheduler.add(request)
    return request


@pytest.mark.parametrize("shift", [SHIFT, ContextShift(16, 0, 8), ContextShift(7, 3, 1), ContextShift(2, 0, 1)])
def test_a_window_is_what_dropping_one_run_after_another_leaves(shift: ContextShift) -> None:
    for length in range(1, 60):
        tokens = list(range(length))
        window = window_of(shift, tokens, num_dropped(shift, length))
        assert window == in_sight(tokens, shift)
        assert window[: shift.keep] == tokens[: shift.keep] and window[-1] == tokens[-1]
        assert len(window) <= shift.context


@pytest.mark.parametrize("prompt_len", [5, 16, 17, 40])
def test_answers_go_on_past_the_context(prompt_len: int) -> None:
    bench = SchedulerBench()
    request = shifting(bench, "a", prompt_len, max_tokens=50)
    outputs = bench.drain()
    assert tokens_of(outputs, "a") == expected_tokens(request, 0)
    assert outputs[-1].finish_reason == "length" and len(tokens_of(outputs, "a")) == 50


def test_a_prompt_of_many_contexts_costs_one_window() -> None:
    bench = SchedulerBench()
    shifting(bench, "a", prompt_len=200, max_tokens=1)
    bench.drain()
    assert sum(plan.num_tokens for plan in bench.plans) <= SHIFT.context


def test_a_shift_computes_the_kept_half_again_and_then_decodes_on() -> None:
    bench = SchedulerBench()
    shifting(bench, "a", prompt_len=16, max_tokens=8)
    bench.drain()
    # 17 tokens: 6 go, 11 are computed at once; then one by one until the window is full again.
    assert [len(plan.rows[0].token_ids) for plan in bench.plans] == [16, 11, 1, 1, 1, 1, 1, 11]


def test_another_turn_finds_the_shifted_window_in_the_prefix_cache() -> None:
    bench = SchedulerBench()
    first = shifting(bench, "a", prompt_len=38, max_tokens=2)
    answer = tokens_of(bench.drain(), "a")
    prompt = [*first.prompt_token_ids, *answer]
    bench.scheduler.add(msgspec.structs.replace(first, request_id="b", prompt_token_ids=prompt))
    assert bench.drain()[-1].num_cached_tokens == 12  # three full blocks of 4


def test_preemption_amid_shifts_changes_no_token() -> None:
    bench = SchedulerBench(num_blocks=8)
    asked = [shifting(bench, name, 10, max_tokens=40, n=n) for name, n in (("a", 1), ("b", 2), ("c", 1), ("d", 2))]
    outputs = bench.drain()
    assert bench.scheduler.stats().preemptions >= 5
    for request in asked:
        for index in range(request.params.n):
            assert tokens_of(outputs, request.request_id, index) == expected_tokens(request, index)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt_len", [15, 17, 22, 23, 60])
def test_every_token_of_a_long_prompt_is_scored_in_its_own_window(prompt_len: int, n: int) -> None:
    bench = SchedulerBench(token_budget=8)
    request = shifting(bench, "a", prompt_len, max_tokens=3, n=n, prompt_logprobs=0)
    outputs = bench.drain()
    (scores,) = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert scores == expected_prompt_logprobs(request)
    assert all(tokens_of(outputs, "a", index) == expected_tokens(request, index) for index in range(n))
