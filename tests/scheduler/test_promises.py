"""Promises of latency on a virtual clock: steps within their time, an edge that admission foresees, and goodput."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

import pytest

from tests.support.virtual_device import LARGE_GPU, RequestTimeline, SimulatedDevice, VirtualServer, quantile
from tokenmill.bench.search import SearchSettings, Trial, search
from tokenmill.config.promises import ServiceLevel, read_service_level
from tokenmill.errors import InvalidConfig, Overloaded
from tokenmill.scheduler.step_time import StepSize, StepTime

PROMISED = ServiceLevel(ttft_s=1.0, tpot_s=0.06)
TRIAL_S = 40.0
WARM_UP_S = 8.0


def load(rate: float, *, is_promised: bool, seed: int = 1) -> list[RequestTimeline]:
    """Requests of random sizes, so many a second, and what became of those that came when all was warm."""
    rng = random.Random(seed)
    promised = PROMISED if is_promised else ServiceLevel(tpot_s=PROMISED.tpot_s)
    server = VirtualServer(rows=64, num_blocks=20_000, promised=promised)
    when_s = 0.0
    while when_s < TRIAL_S:
        when_s += rng.expovariate(rate)
        prompt, output = rng.randint(50, 350), rng.randint(10, 50)
        server.at(when_s, lambda prompt=prompt, output=output: server.ask(prompt=prompt, output=output))
    server.run(TRIAL_S)
    server.run(TRIAL_S + 20.0)
    return [life for life in server.lives.values() if WARM_UP_S < life.sent_s < TRIAL_S]


def keeps(life: RequestTimeline) -> bool:
    assert PROMISED.ttft_s is not None and PROMISED.tpot_s is not None
    return life.ended_s is not None and life.ttft_s <= PROMISED.ttft_s and life.tpot_s <= PROMISED.tpot_s


def goodput(rate: float) -> float:
    """Requests a second that were answered as promised."""
    return sum(keeps(life) for life in load(rate, is_promised=True)) / (TRIAL_S - WARM_UP_S)


@cache
def edge() -> float:
    """The highest rate at which 19 of 20 requests are as promised where none is refused, by `bench search`."""

    def try_rate(rate: float) -> Trial:
        lives = load(rate, is_promised=False)
        late = sum(not keeps(life) for life in lives)
        return Trial(rate, late <= 0.05 * len(lives), {}, "late" if late > 0.05 * len(lives) else "", len(lives))

    found = search(try_rate, SearchSettings(start=2.0, most=64.0, is_whole=False, most_trials=14)).best
    assert found is not None
    return found


def refused_part(rate: float) -> float:
    lives = load(rate, is_promised=True)
    return sum(life.refused_s is not None for life in lives) / len(lives)


@pytest.mark.slow
def test_the_edge_that_bench_search_finds_is_where_admission_begins_to_refuse() -> None:
    assert refused_part(0.9 * edge()) <= 0.01 < refused_part(1.1 * edge())


@pytest.mark.slow
def test_goodput_does_not_fall_beyond_the_edge() -> None:
    peak = max(goodput(part * edge()) for part in (0.9, 1.0, 1.1, 1.25))
    assert goodput(1.5 * edge()) >= 0.9 * peak


def test_what_is_accepted_is_answered_in_time_under_too_much_load() -> None:
    lives = load(8.0, is_promised=True)
    accepted = [life for life in lives if life.refused_s is None]
    assert sum(not keeps(life) for life in accepted) <= 0.1 * len(accepted)
    assert sum(keeps(life) for life in lives) / (TRIAL_S - WARM_UP_S) >= 5.0
    assert all(life.refused_s > 1.0 for life in lives if life.refused_s is not None), "the wait that was foreseen"
    unprotected = load(8.0, is_promised=False)
    assert sum(map(keeps, unprotected)) < 0.3 * len(unprotected), "the test can see: nothing is refused, all are late"


@pytest.mark.parametrize("limit_s", [None, 0.06])
def test_a_long_prompt_does_not_hold_up_streams(limit_s: float | None) -> None:
    """A prompt of 4,096 tokens beside eight streams."""
    server = VirtualServer(rows=16, step_limit_s=limit_s)
    streams = [server.ask(prompt=64, output=400) for _ in range(8)]
    server.run(0.5)
    long = server.ask(prompt=4096, output=4)
    sent_s = server.now
    server.run()
    gaps = [gap for life in streams for gap in life.gaps]
    undisturbed_s = quantile(gaps, 0.5)
    if limit_s is None:
        assert max(gaps) > 5 * undisturbed_s, "the test can see"
        return
    during = [gap for life in streams for gap, at in zip(life.gaps, life.token_times[1:], strict=True) if at > sent_s]
    assert max(during) <= 1.05 * limit_s
    alone = VirtualServer(rows=16)
    first = alone.ask(prompt=4096, output=4)
    alone.run()
    # Streams take their part of each step: what they need anyway is not the promise's cost.
    answers_s = SimulatedDevice().seconds(StepSize(8, 8, 8 * 300))
    assert long.ttft_s <= 1.3 * first.ttft_s * limit_s / (limit_s - answers_s)


def test_a_prompt_alone_takes_all_of_a_step() -> None:
    server = VirtualServer(step_limit_s=0.02)
    server.ask(prompt=2000, output=2)
    server.run()
    server.ask(prompt=2000, output=2)
    server.run()
    assert max(size.tokens for size, _ in server.steps) == 512


@pytest.mark.parametrize(
    "device",
    [SimulatedDevice(), LARGE_GPU, SimulatedDevice(context_s=0.0, pair_s=0.0), SimulatedDevice(context_s=1.2e-6)],
)
def test_the_time_of_steps_is_learned(device: SimulatedDevice) -> None:
    rng = random.Random(3)
    model = StepTime()
    sizes = [
        StepSize(rows + prompt, rows, rows * 400 + start * (prompt > 0), prompt * start)
        for rows, prompt, start in (
            (rng.choice((1, 4, 16)), rng.choice((0, 0, 20, 100, 512)), rng.choice((60, 900, 3000))) for _ in range(300)
        )
    ]
    for number, size in enumerate(sizes):
        slow = 20.0 if number % 50 == 49 else rng.uniform(0.95, 1.05)  # now and then the machine does something else
        model.note(size, device.seconds(size) * slow)
    for size in sizes[-50:]:
        assert model.seconds(size) == pytest.approx(device.seconds(size), rel=0.15)


def test_nothing_is_limited_or_refused_before_a_prompt_was_measured() -> None:
    server = VirtualServer(promised=ServiceLevel(0.001, 0.001))
    assert server.ask(prompt=4000).refused_s is None
    server.run()
    assert server.ask(prompt=4000).refused_s is not None
    assert server.ask(prompt=4000, priority=1000).refused_s is None, "lines of batches wait"


@pytest.mark.parametrize("text", ["ttft", "ttft=1s,ttft=2s", "itl=1s", "tpot=fast", "ttft=0s", "ttft=-1s"])
def test_what_is_no_promise_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="is not a latency target"):
        read_service_level(text)


def test_promises_are_read() -> None:
    assert read_service_level("ttft=1s, tpot=50ms") == ServiceLevel(1.0, 0.05)
    assert read_service_level("tpot=0.1") == ServiceLevel(None, 0.1)
    assert read_service_level(None) == ServiceLevel()


def test_a_refused_request_leaves_nothing_behind() -> None:
    server = VirtualServer(promised=ServiceLevel(ttft_s=0.001))
    server.ask(prompt=500)
    server.run()
    with pytest.raises(Overloaded, match="exceeds the limit"):
        server.scheduler.add(server.ask("other", prompt=500).request)
    assert not server.scheduler.has_work and not len(server.scheduler._tenants)


def test_a_full_queue_tells_how_long_others_waited() -> None:
    server = VirtualServer(rows=1)
    for _ in range(40):
        server.ask(prompt=50, output=20)
    server.run()
    waits = [life.token_times[0] - life.sent_s for life in list(server.lives.values())[-10:]]
    assert min(waits) / 3 < server.scheduler.stats().wait_s < max(waits)


# ── a GPU: two steps in flight, prompts in a pass of their own ─────────────────────────────────────────

LONG_TOKENS = 16_384
NUM_STREAMS = 32


@dataclass(frozen=True)
class LongPrompt:
    """What a long prompt and the streams beside it saw."""

    alone_s: float  # to its first token
    beside_s: float
    num_started: int  # streams that had a token before it came
    gaps: list[float]  # of the streams, while it was computed
    chunks: list[int]
    learned: float  # estimated over true time of decoding alone, right after it


def long_prompt_on_gpu(
    *,
    depth: int,
    num_cold: int = 0,
    device: SimulatedDevice = LARGE_GPU,
    num_tokens: int = LONG_TOKENS,
    **settings: object,
) -> LongPrompt:
    """`num_cold`: the first steps of a server take seconds, since kernels are compiled in them."""
    server = VirtualServer(device, rows=256, tokens=8192, num_blocks=20_000, depth=depth, **settings)  # type: ignore[arg-type]
    server.cold_steps = [2.0] * num_cold
    server.ask(prompt=512, output=4)
    server.run()
    alone = server.ask(prompt=num_tokens, output=4)
    server.run()
    streams = [server.ask(prompt=32, output=100_000) for _ in range(NUM_STREAMS)]
    server.run(server.now + 0.5)
    num_started, num_before = sum(bool(life.token_times) for life in streams), len(server.steps)
    beside = server.ask(prompt=num_tokens, output=4)
    while not beside.token_times and server.now < beside.sent_s + 30.0:
        server.run(server.now + 0.1)
    answered_s = beside.token_times[0] if beside.token_times else float("inf")
    times = [time_s for life in streams for time_s in zip(life.gaps, life.token_times[1:], strict=True)]
    gaps = [gap for gap, at in times if beside.sent_s < at <= answered_s]
    chunks = [size.tokens - size.samples for size, _ in server.steps[num_before:] if size.has_prompts]
    answers = StepSize(NUM_STREAMS, NUM_STREAMS, sum(len(life.token_times) for life in streams))
    learned = server.scheduler.step_time.seconds(answers) / device.seconds(answers)
    return LongPrompt(alone.ttft_s, answered_s - beside.sent_s, num_started, gaps, chunks, learned)


ANSWERS_S = LARGE_GPU.seconds(StepSize(NUM_STREAMS, NUM_STREAMS, NUM_STREAMS * 200))


def beside_s(num_steps: int) -> float:
    """Seconds of answers, and of what the end of the prompt costs however few its tokens are, after so many steps."""
    answers_s = LARGE_GPU.seconds(StepSize(NUM_STREAMS, NUM_STREAMS, NUM_STREAMS * (200 + num_steps)))
    return answers_s + LARGE_GPU.prompts_s + LONG_TOKENS * LARGE_GPU.context_s


@pytest.mark.parametrize(("tpot_s", "depth"), [(0.02, 2), (0.012, 2), (0.0055, 2), (0.001, 2), (0.001, 1)])
def test_streams_and_a_long_prompt_go_on_whatever_is_promised(tpot_s: float, depth: int) -> None:
    """Also where not even a step of a lone sequence is as short as promised, or none with a prompt in it."""
    seen = long_prompt_on_gpu(depth=depth, step_limit_s=tpot_s, promised=ServiceLevel(tpot_s=tpot_s))
    assert seen.num_started == NUM_STREAMS, "a promise that can't be kept stops nobody"
    least_s = beside_s(len(seen.chunks)) * 8 / 7  # an eighth of a step is for the tokens of prompts
    assert quantile(seen.gaps, 0.99) <= 1.05 * max(tpot_s, least_s)
    part = max(1.0 - beside_s(len(seen.chunks)) / tpot_s, 1 / 8)
    assert seen.beside_s <= 1.2 * seen.alone_s / part


@pytest.mark.parametrize("num_cold", [0, 3])
def test_streams_go_on_beside_a_long_prompt_by_default(num_cold: int) -> None:
    seen = long_prompt_on_gpu(depth=2, step_limit_s=0.05, num_cold=num_cold)
    assert seen.num_started == NUM_STREAMS
    assert len(seen.gaps) >= NUM_STREAMS * len(seen.chunks) * 0.9, "every step has a token of every stream"
    assert quantile(seen.gaps, 0.99) <= 1.1 * 0.05
    assert seen.beside_s <= 1.3 * seen.alone_s * 0.05 / (0.05 - beside_s(len(seen.chunks)))


def test_chunks_of_a_prompt_do_not_shrink_because_they_are_small() -> None:
    """Reading what is before them costs as much for ten tokens as for a hundred."""
    chunks = long_prompt_on_gpu(depth=2, step_limit_s=0.012, promised=ServiceLevel(tpot_s=0.012)).chunks
    answers_s = LARGE_GPU.seconds(StepSize(NUM_STREAMS, NUM_STREAMS, NUM_STREAMS * (200 + len(chunks))))
    for place, num_tokens in ((len(chunks) // 2, chunks[len(chunks) // 2]), (-2, chunks[-2])):
        start = sum(chunks[:place])
        left_s = 0.012 - answers_s - LARGE_GPU.prompts_s - start * LARGE_GPU.context_s
        assert num_tokens * (LARGE_GPU.token_s + start * LARGE_GPU.pair_s) >= 0.8 * left_s


# As LARGE_GPU, with a kernel for chunks whose time is that of reading what is before them.
FAST_CHUNKS = replace(LARGE_GPU, prompts_s=3e-4, pair_s=2e-10)


@pytest.mark.parametrize("tpot_s", [0.0065, 0.008, 0.009])
def test_the_least_chunk_does_not_make_steps_much_longer_at_the_end_of_a_long_prompt(tpot_s: float) -> None:
    """There the reading of the prompt exceeds what is left of the limit, so the least chunk decides."""
    promised = ServiceLevel(tpot_s=tpot_s)
    seen = long_prompt_on_gpu(depth=2, device=FAST_CHUNKS, num_tokens=65_536, step_limit_s=tpot_s, promised=promised)
    context = NUM_STREAMS * len(seen.chunks)
    undisturbed_s = FAST_CHUNKS.seconds(StepSize(NUM_STREAMS, NUM_STREAMS, context))
    assert quantile(seen.gaps, 0.99) <= 1.46 * undisturbed_s
    assert min(seen.chunks[:-1]) >= 12, "a prompt always makes progress"
    assert seen.beside_s <= 10.0 * seen.alone_s


class TiledDevice(SimulatedDevice):
    """Attention of chunks is computed in tiles of 32 tokens."""

    def seconds(self, size: StepSize) -> float:
        prompt = size.tokens - size.samples
        tiled = -(-prompt // 32) * 32
        return super().seconds(size._replace(pairs=size.pairs * tiled // prompt if prompt else 0))


def test_chunks_behind_a_long_context_fill_tiles() -> None:
    """A chunk of 48 tokens would take as long as one of 64."""
    device = TiledDevice(base_s=4.2e-3, token_s=2.4e-5, sample_s=0.0, context_s=2e-8, pair_s=1e-9, prompts_s=3e-4)
    promised = ServiceLevel(tpot_s=0.0085)
    seen = long_prompt_on_gpu(depth=2, device=device, num_tokens=40_000, step_limit_s=0.0085, promised=promised)
    starts = accumulate(seen.chunks, initial=0)
    late = [count for start, count in zip(starts, seen.chunks[:-1], strict=False) if start >= 16_384]
    assert len(set(late)) > 1 and all(count <= 16 or count % 32 == 0 for count in late)


def test_the_time_of_decoding_alone_is_not_forgotten_beside_a_long_prompt() -> None:
    """For thousands of steps, none is without a prompt."""
    seen = long_prompt_on_gpu(
        depth=2, device=FAST_CHUNKS, num_tokens=65_536, step_limit_s=0.009, promised=ServiceLevel(tpot_s=0.009)
    )
    assert seen.learned == pytest.approx(1.0, abs=0.1)
