"""The scheduler's rules one by one, with the checking runner."""

from __future__ import annotations

import pytest

from tests.support.scheduler_bench import SchedulerBench, ask, endings, tokens_of
from tests.support.simulated_runner import expected_tokens
from tokenmill.errors import InvalidRequest
from tokenmill.params import BeamParams, SamplingParams
from tokenmill.scheduler.request import mixed_seed
from tokenmill.scheduler.running import RunningSet
from tokenmill.types import Request


def test_nothing_to_run_is_no_plan() -> None:
    bench = SchedulerBench()
    assert bench.scheduler.plan() is None and not bench.scheduler.has_work


def test_long_prompts_come_in_chunks_and_decoding_goes_on() -> None:
    bench = SchedulerBench(token_budget=8)
    bench.scheduler.add(ask("a", prompt_len=4, max_tokens=12))
    bench.step()
    bench.scheduler.add(ask("b", prompt_len=30, max_tokens=2))
    for _ in range(4):
        outputs = bench.step()
        assert len(tokens_of(outputs, "a")) == 1, "a decoding sequence waits for a prompt"
        assert sorted(len(row.token_ids) for row in bench.plans[-1].rows) == [1, 7]


def test_a_long_prompt_of_higher_priority_leaves_every_decode_its_token() -> None:
    bench = SchedulerBench(token_budget=8)
    bench.scheduler.add(ask("low", prompt_len=1, max_tokens=30, priority=5))
    bench.step()
    bench.scheduler.add(ask("long", prompt_len=100, max_tokens=1, priority=-1))
    for _ in range(10):
        assert len(tokens_of(bench.step(), "low")) == 1
        assert bench.plans[-1].num_tokens == 8


def test_priority_then_arrival() -> None:
    bench = SchedulerBench(max_running=1)
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -5)):
        bench.scheduler.add(ask(name, priority=priority, max_tokens=2))
    assert [name for name, _, _ in endings(bench.drain())] == ["urgent", "first", "second", "late"]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption_changes_no_token(prefix_caching: bool) -> None:
    bench = SchedulerBench(num_blocks=14, prefix_caching=prefix_caching)
    requests = [ask(name, prompt_len=6, max_tokens=25, n=n) for name, n in (("a", 1), ("b", 3), ("c", 1), ("d", 2))]
    for request in requests:
        bench.scheduler.add(request)
    outputs = bench.drain()
    assert bench.scheduler.stats().preemptions >= 5
    for request in requests:
        for index in range(request.params.n):
            assert tokens_of(outputs, request.request_id, index) == expected_tokens(request, index)


def test_the_lowest_priority_and_latest_is_preempted_first() -> None:
    bench = SchedulerBench(num_blocks=12)
    for name, priority in (("low", 5), ("first", 0), ("second", 0)):
        bench.scheduler.add(ask(name, prompt_len=7, max_tokens=24, priority=priority))
    assert [name for name, _, _ in endings(bench.drain())] == ["first", "second", "low"]
    assert bench.scheduler.stats().preemptions > 0


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    bench = SchedulerBench(num_blocks=11)
    with pytest.raises(InvalidRequest, match="needs up to 11 KV blocks of 4 tokens, the pool has 10"):
        bench.scheduler.add(ask("big", prompt_len=20, max_tokens=22))
    bench.scheduler.add(ask("just", prompt_len=20, max_tokens=21))
    assert endings(bench.drain()) == [("just", 0, "length")]


def test_prefix_hits_are_counted_and_prompt_logprobs_forgo_them() -> None:
    bench = SchedulerBench()
    prompt = ask("a", prompt_len=17)
    bench.scheduler.add(prompt)
    bench.drain()
    for params, cached in (({}, 16), ({"prompt_logprobs": 0}, 0)):
        bench.scheduler.add(
            Request(
                request_id="again",
                prompt_token_ids=prompt.prompt_token_ids,
                params=SamplingParams(**params),
                max_tokens=1,
                seed=1,
            )
        )
        assert bench.drain()[-1].num_cached_tokens == cached
    assert bench.scheduler.stats().prefix_hit_tokens == 16


def test_one_bad_row_ends_its_request_only() -> None:
    bench = SchedulerBench()
    good, bad = ask("good"), ask("bad", n=2)
    bench.runner.fail_rows_of.add(mixed_seed(bad.seed, 1))
    bench.scheduler.add(good)
    bench.scheduler.add(bad)
    outputs = bench.drain()
    assert sorted(endings(outputs)) == [("bad", 0, "error"), ("bad", 1, "error"), ("good", 0, "length")]
    assert tokens_of(outputs, "good") == expected_tokens(good, 0)


def test_prefill_only() -> None:
    bench = SchedulerBench(token_budget=8)
    bench.scheduler.add(ask("a", prompt_len=20, max_tokens=0, prompt_logprobs=0))
    (output,) = bench.drain()
    assert output.finish_reason == "length" and output.token_ids == []
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 19


def test_stop_ids_end_not_before_min_tokens() -> None:
    bench = SchedulerBench()
    free = expected_tokens(ask("a", max_tokens=10), 0)
    bench.scheduler.add(ask("a", max_tokens=10, stop_token_ids=[free[3]]))
    last = bench.drain()[-1]
    assert (last.finish_reason, last.stop_token_id) == ("stop", free[3])
    held = ask("a", max_tokens=10, stop_token_ids=[free[3]], min_tokens=6)
    bench.scheduler.add(held)
    outputs = bench.drain()
    assert len(tokens_of(outputs, "a")) >= 6 and tokens_of(outputs, "a") == expected_tokens(held, 0)


def test_eos_ends_unless_ignored() -> None:
    bench = SchedulerBench()
    eos = expected_tokens(ask("a", max_tokens=10), 0)[2]
    heeds = Request(
        request_id="a",
        prompt_token_ids=ask("a").prompt_token_ids,
        params=SamplingParams(),
        eos_token_ids=[eos],
        max_tokens=10,
        seed=ask("a").seed,
    )
    bench.scheduler.add(heeds)
    outputs = bench.drain()
    assert outputs[-1].finish_reason == "stop" and tokens_of(outputs, "a")[-1] == eos


def test_more_samples_than_rows() -> None:
    bench = SchedulerBench(max_running=3)
    request = ask("a", n=10)
    bench.scheduler.add(request)
    outputs = bench.drain()
    assert all(tokens_of(outputs, "a", index) == expected_tokens(request, index) for index in range(10))


def test_abort_is_idempotent_and_leaves_nothing() -> None:
    bench = SchedulerBench()
    bench.scheduler.add(ask("a", n=3))
    bench.scheduler.add(ask("b", beam=BeamParams(3)))
    bench.step()
    for name in ("a", "a", "b", "unknown"):
        bench.scheduler.abort(name)
    assert not bench.scheduler.has_work and bench.cache.num_used == 0


def test_time_in_the_queue_is_told_once() -> None:
    bench = SchedulerBench(max_running=1)
    bench.scheduler.add(ask("a", max_tokens=4))
    bench.scheduler.add(ask("b", max_tokens=2))
    waits = [o.queue_s for o in bench.drain() if o.request_id == "b"]
    assert waits == [4.0, 0.0]


def test_seeds_of_samples_differ_and_stay() -> None:
    seeds = [mixed_seed(42, index) for index in range(100)]
    assert len(set(seeds)) == 100 and seeds == [mixed_seed(42, index) for index in range(100)]
    assert all(0 <= mixed_seed(seed, 0) < 2**63 for seed in (-(2**63), -1, 0, 2**63 - 1))


@pytest.mark.parametrize("num_rows", [2, 8])
def test_a_plan_counts_its_rows_once(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting everyone again for each row made a step of 1,000 rows last longer than a GPU computes it."""
    bench = SchedulerBench()
    for number in range(num_rows):
        bench.scheduler.add(ask(str(number), prompt_len=2))
    bench.step()
    asked: list[RunningSet] = []
    count = RunningSet.num_sequences.fget
    assert count is not None
    monkeypatch.setattr(RunningSet, "num_sequences", property(lambda running: asked.append(running) or count(running)))
    bench.scheduler.plan()
    assert len(asked) == 1


def test_a_request_for_many_samples_keeps_no_rows_idle() -> None:
    """Eight rows of requests that end one after another; eight samples come, then short requests."""
    bench = SchedulerBench(max_running=8, num_blocks=400)
    long = [ask(f"long {number}", max_tokens=20 + 10 * number) for number in range(8)]
    many, short = ask("many", n=8, max_tokens=30), [ask(f"short {number}", max_tokens=3) for number in range(20)]
    for request in (*long, many, *short):
        bench.scheduler.add(request)
    outputs, num_idle = [], 0
    while bench.scheduler.has_work:
        outputs += bench.step()
        if ("short 19", 0, "length") in endings(outputs):
            break
        num_idle += 8 - len(bench.scheduler.running)
    assert num_idle < 40, f"{num_idle} rows were idle in steps while requests waited"
    outputs += bench.drain()
    for request in (*long, *short):
        assert tokens_of(outputs, request.request_id) == expected_tokens(request, 0)
    for index in range(8):
        assert tokens_of(outputs, "many", index) == expected_tokens(many, index)
