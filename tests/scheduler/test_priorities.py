"""Preemption by priority: a waiting request of higher priority replaces running ones of lower priority."""

from __future__ import annotations

from tests.support.scheduler_bench import SchedulerBench, ask, endings, tokens_of
from tests.support.simulated_runner import expected_tokens
from tokenmill.params import BeamParams
from tokenmill.types import BACKGROUND_PRIORITY


def names_running(bench: SchedulerBench) -> list[str]:
    return [sequence.state.request.request_id for sequence in bench.scheduler.running]


def test_when_rows_are_short_the_youngest_of_the_lowest_priority_goes() -> None:
    bench = SchedulerBench(max_running=3)
    for name, priority in (("mid", 1), ("old", 5), ("young", 5)):
        bench.scheduler.add(ask(name, priority=priority, max_tokens=20))
    bench.step()
    bench.scheduler.add(ask("urgent", priority=0, max_tokens=2))
    bench.step()
    assert names_running(bench) == ["urgent", "mid", "old"]
    outputs = bench.drain()
    assert endings(outputs)[0][0] == "urgent"
    assert bench.scheduler.stats().preemptions == 1


def test_when_blocks_are_short_as_many_go_as_must() -> None:
    bench = SchedulerBench(num_blocks=13, prefix_caching=False)  # twelve of 4 tokens
    low = [ask(name, prompt_len=8, max_tokens=4, priority=3) for name in ("a", "b", "c")]
    for request in low:
        bench.scheduler.add(request)
    outputs = bench.step()
    urgent = ask("urgent", prompt_len=22, max_tokens=2)
    bench.scheduler.add(urgent)
    outputs += bench.step()
    assert names_running(bench) == ["urgent", "a", "b"] and tokens_of(outputs, "urgent")
    outputs += bench.drain()
    assert bench.scheduler.stats().preemptions == 1
    for request in (urgent, *low):
        assert tokens_of(outputs, request.request_id) == expected_tokens(request, 0)


def test_what_made_way_comes_back_and_says_what_it_would_have_said() -> None:
    bench = SchedulerBench(max_running=2)
    requests = [ask("low", priority=2, n=2, max_tokens=9), ask("beams", priority=1, beam=BeamParams(2), max_tokens=6)]
    bench.scheduler.add(requests[0])
    first = bench.step()
    bench.scheduler.add(requests[1])
    outputs = first + bench.drain()
    assert bench.scheduler.stats().preemptions == 2
    assert endings(outputs)[0][0] == "beams"
    for index in range(2):
        assert tokens_of(outputs, "low", index) == expected_tokens(requests[0], index)


def test_equals_wait_their_turn() -> None:
    bench = SchedulerBench(max_running=1)
    bench.scheduler.add(ask("first", max_tokens=9))
    bench.step()
    bench.scheduler.add(ask("second", max_tokens=2))
    assert [name for name, _, _ in endings(bench.drain())] == ["first", "second"]
    assert bench.scheduler.stats().preemptions == 0


def test_nobody_goes_in_vain() -> None:
    """The others of its own priority hold what it needs, so it waits for them and the lowest goes on."""
    bench = SchedulerBench(num_blocks=13, prefix_caching=False)
    bench.scheduler.add(ask("equal", prompt_len=28, max_tokens=3))
    bench.scheduler.add(ask("low", prompt_len=6, max_tokens=3, priority=4))
    bench.step()
    bench.scheduler.add(ask("large", prompt_len=30, max_tokens=2))
    assert tokens_of(bench.step(), "low")
    assert [name for name, _, _ in endings(bench.drain())] == ["equal", "low", "large"]
    assert bench.scheduler.stats().preemptions == 0


# ── the background ─────────────────────────────────────────────────────────────────────────────────────


def rows_of_last_step(bench: SchedulerBench) -> int:
    return len(bench.plans[-1].rows)


def test_the_background_has_all_when_it_is_alone_and_little_beside_others() -> None:
    bench = SchedulerBench(token_budget=32)
    lines = [ask(f"line{n}", prompt_len=6, max_tokens=30, priority=BACKGROUND_PRIORITY) for n in range(6)]
    for line in lines:
        bench.scheduler.add(line)
    outputs = bench.step()
    assert sum(len(row.token_ids) for row in bench.plans[-1].rows) == 32, "its prompts take the whole step"
    outputs += bench.step() + bench.step()
    assert rows_of_last_step(bench) == 6
    talk = ask("talk", prompt_len=40, max_tokens=4)
    bench.scheduler.add(talk)
    outputs += bench.step()
    assert [len(row.token_ids) for row in bench.plans[-1].rows] == [32], "nothing beside a prompt"
    outputs += bench.step()
    assert rows_of_last_step(bench) == 1
    outputs += bench.step()
    assert rows_of_last_step(bench) == 1 + 2, "a sixteenth of the step beside an answer"
    while tokens_of(outputs, "talk") != expected_tokens(talk, 0):
        outputs += bench.step()
    bench.step()
    assert rows_of_last_step(bench) == 2, "the next one may come soon"
    bench.now += 5.0
    bench.step()
    assert rows_of_last_step(bench) == 6
    assert bench.scheduler.stats().preemptions == 0


def test_the_background_says_what_it_would_have_said() -> None:
    bench = SchedulerBench(max_running=3)
    requests = [ask(f"line{n}", max_tokens=9, priority=BACKGROUND_PRIORITY) for n in range(5)]
    for request in requests:
        bench.scheduler.add(request)
    outputs = bench.step() + bench.step()
    for n in range(4):
        requests.append(ask(f"talk{n}", prompt_len=20, max_tokens=3))
        bench.scheduler.add(requests[-1])
        outputs += bench.step()
    outputs += bench.drain()
    assert {name[:4] for name, _, _ in endings(outputs)[:4]} == {"talk"}
    for request in requests:
        assert tokens_of(outputs, request.request_id) == expected_tokens(request, 0)


def test_the_background_goes_on_while_another_request_finds_no_room() -> None:
    bench = SchedulerBench(num_blocks=13, prefix_caching=False)
    bench.scheduler.add(ask("equal", prompt_len=28, max_tokens=3))
    bench.scheduler.add(ask("line", prompt_len=6, max_tokens=3, priority=BACKGROUND_PRIORITY))
    bench.step()
    bench.scheduler.add(ask("large", prompt_len=30, max_tokens=2))
    assert len(endings(bench.drain())) == 3
