"""The search for the edge: on made-up servers with noise, and on a real one whose capacity is known."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.bench.load import ClosedLoop, LoadRun, OpenLoop, Target
from tokenmill.bench.report import sentence
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.search import (
    SearchSettings,
    Trial,
    Verdict,
    belief_of,
    judge,
    queue_grows,
    read_trials,
    search,
    write_trials,
)
from tokenmill.bench.totals import meets, parse_goodput, parse_limits
from tokenmill.bench.workloads import Workload
from tokenmill.cli import main
from tokenmill.cli.bench_load import RunConfig, WorkloadConfig
from tokenmill.cli.bench_serve import ArrivalConfig, ResultConfig, SearchConfig, trier
from tokenmill.errors import InvalidConfig


def server(capacity: float, noise: float = 0.0, seed: int = 0) -> Callable[[float], Trial]:
    drawing = random.Random(seed)

    def attempt(level: float) -> Trial:
        passed = level <= capacity + drawing.gauss(0, noise)
        return Trial(level, passed, {"tpot_p95=100ms": level / 1000}, "" if passed else "slow")

    return attempt


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8, 31, 32, 33, 37, 100, 1000])
def test_the_edge_is_found_exactly_without_noise(capacity: int) -> None:
    verdict = search(server(capacity), SearchSettings())
    assert (verdict.best, verdict.first_failing) == (capacity, capacity + 1)
    assert len(verdict.trials) < 30 and verdict.confidence > 0.7


def test_noise_moves_it_little() -> None:
    found = [search(server(37, noise=0.4, seed=seed), SearchSettings()).best for seed in range(10)]
    assert sum(best is not None and abs(best - 37) <= 1 for best in found) >= 9


def test_luck_of_a_fifth_takes_more_trials_and_says_so() -> None:
    """Single trials of such a server are luck from 35 to 65: the search does not believe the first ones."""
    verdicts = [search(server(50, noise=10, seed=seed), SearchSettings(start=16)) for seed in range(4)]
    assert all(verdict.best is not None and 43 <= verdict.best <= 57 for verdict in verdicts)
    assert all(len(verdict.trials) > 20 for verdict in verdicts)
    assert sum(low <= 50 <= high for low, high in (verdict.likely for verdict in verdicts)) >= 3
    assert all(verdict.confidence >= 0.9 or len(verdict.trials) == 60 for verdict in verdicts)


def test_a_contradiction_makes_it_watch_the_machine_for_longer() -> None:
    """A trial takes 5 s. The first at 32 happens to fall into a slow moment; nothing else ever contradicts."""

    def verdict_of(unlucky: set[float], noisy_s: float) -> Verdict:
        clock, left = itertools.count(1_000, 5), set(unlucky)

        def attempt(level: float) -> Trial:
            passed = level <= 37 and level not in left
            left.discard(level)
            return Trial(level, passed, {}, "" if passed else "slow", ended_s=next(clock))

        return search(attempt, SearchSettings(start=16, noisy_s=noisy_s, most_trials=100))

    hasty, patient, steady = verdict_of({32}, 0), verdict_of({32}, 300), verdict_of(set(), 300)
    assert len(hasty.trials) < 40 < 60 < len(patient.trials) < 70
    assert patient.best == steady.best == 37 and len(steady.trials) < 20  # no contradiction, no reason to wait


def test_ends_of_the_range() -> None:
    nothing = search(server(0), SearchSettings())
    assert (nothing.best, nothing.first_failing) == (None, 1) and 1 < len(nothing.trials) < 5
    all_pass = search(server(10_000), SearchSettings(most=100))
    assert (all_pass.best, all_pass.first_failing) == (100, None) and len(all_pass.trials) < 15
    assert search(server(5), SearchSettings(start=64)).best == 5
    assert search(server(1), SearchSettings(start=8)).best == 1
    low_rate = search(server(0.3), SearchSettings(start=2, is_whole=False)).best
    assert low_rate is not None and 0.285 <= low_rate <= 0.315
    rate = search(server(3.3), SearchSettings(start=0.5, is_whole=False))
    assert rate.best is not None and 3.13 <= rate.best <= 3.47


def test_no_more_trials_than_allowed() -> None:
    for most in (1, 2, 7, 12):
        verdict = search(server(1000), SearchSettings(most_trials=most))
        assert len(verdict.trials) == most and verdict.confidence < 0.9
    for wrong in ({"confidence": 0.0}, {"confidence": 1.0}, {"most_trials": 0}):
        with pytest.raises(InvalidConfig):
            SearchSettings(**wrong)  # type: ignore[arg-type]


def test_belief_narrows_with_agreement_and_widens_with_contradiction() -> None:
    agreeing = belief_of([(36, True), (37, True), (38, False), (39, False)] * 2, 1, 4096)
    contradicted = belief_of([(36, True), (37, False), (38, True), (39, False)] * 2, 1, 4096)
    assert agreeing.probs.sum() == pytest.approx(1) and agreeing.between(0, math.inf) == pytest.approx(1)
    assert 35 < agreeing.quantile(0.05) < agreeing.quantile(0.5) < agreeing.quantile(0.95) < 40
    assert agreeing.between(37, 38) > 2 * contradicted.between(37, 38)
    alone = belief_of([(8, False)], 1, 64)
    assert alone.between(0, 8) > 0.9


def test_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path, settings = tmp_path / "search.json", {"slo": "x"}
    whole = search(server(37), SearchSettings())
    write_trials(path, settings, whole.trials[:9])
    made: list[float] = []

    def attempt(level: float) -> Trial:
        made.append(level)
        return server(37)(level)

    resumed = search(attempt, SearchSettings(), read_trials(path, settings))
    assert resumed.best == 37 and len(made) == len(whole.trials) - 9
    with pytest.raises(InvalidConfig, match="other settings"):
        read_trials(path, {"slo": "y"})


def test_a_search_that_is_broken_off_says_what_is_known() -> None:
    def until(last: float, capacity: float) -> Callable[[float], Trial]:
        def attempt(level: float) -> Trial:
            if level == last:
                raise KeyboardInterrupt
            return server(capacity)(level)

        return attempt

    both = search(until(12, 10), SearchSettings())
    assert both.was_cut_short and both.best is not None and 8 <= both.best < 16 and len(both.trials) == 5
    assert "cut short" in sentence(both, "concurrency")
    passed = search(until(16, 37), SearchSettings())
    assert (passed.best, passed.first_failing) == (8, None) and passed.confidence > 0.9
    assert sentence(passed, "concurrency").startswith("Concurrency 8, the highest tried so far, is within")
    unsure = sentence(replace(both, confidence=0.32, best=11, likely=(9, 13)), "concurrency")
    assert unsure.startswith(
        "Concurrency: 8 held, 16 failed; best guess 11, 32 % sure from 5 trials, likely between 9"
    ), unsure
    certain = sentence(search(server(37), SearchSettings()), "concurrency")
    assert certain.startswith("Concurrency: 37 held, 38 failed; the largest within the limits is 37, "), certain
    failed = search(until(4, 1), SearchSettings(start=16))
    assert (failed.best, failed.first_failing) == (None, 8) and failed.confidence > 0.9
    assert not search(server(37), SearchSettings(most=16)).was_cut_short
    with pytest.raises(KeyboardInterrupt):  # nothing is known yet
        search(until(1, 37), SearchSettings())


def test_a_search_that_is_terminated_prints_its_verdict(stub: Callable[..., str]) -> None:
    url = stub(mode="schedule", ttft=0.001, itl=0.01, tokens=4)
    command = [sys.executable, "-m", "tokenmill", "bench", "search", "--url", url, "--max-lag-ms", "60000"]
    command += ["--slo", "ttft_p95=60s,tpot_p95=60s"]  # whatever the machine is busy with, the first trials hold
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(3)]
        process.terminate()
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    found = json.loads(output.splitlines()[-1])
    assert found["was_cut_short"] and found["best"] >= 2 and len(found["trials"]) >= len(seen) - 1


def test_a_search_takes_the_flags_of_bench_serve() -> None:
    began = SearchConfig().with_arrival(ArrivalConfig(concurrency=16))
    assert (began.over, began.start, began.is_closed) == ("concurrency", 16, True)
    rates = ArrivalConfig(rate=2.5, duration_s=5, arrivals="gamma", burstiness=0.3)
    by_rate = SearchConfig().with_arrival(rates)
    assert (by_rate.over, by_rate.start, by_rate.trial_s) == ("rate", 2.5, 5)
    assert not by_rate.settings(rates).is_whole
    assert SearchConfig(start=3).with_arrival(ArrivalConfig()).settings(ArrivalConfig()).start == 3
    for wrong in (ArrivalConfig(trace=Path("x")), ArrivalConfig(rate=1, arrivals="ramp")):
        with pytest.raises(InvalidConfig):
            SearchConfig().with_arrival(wrong)
    with pytest.raises(InvalidConfig, match="--rate does not apply"):
        SearchConfig(over="concurrency").with_arrival(ArrivalConfig(rate=1))
    with pytest.raises(InvalidConfig, match="--duration-s needs --over rate"):
        began.settings(ArrivalConfig(duration_s=3))
    with pytest.raises(InvalidConfig, match="--goodput needs `bench serve`"):
        ResultConfig(goodput="ttft=1s").check_search()
    verdict = search(server(8), SearchSettings())
    assert ResultConfig().price_at(verdict) is None
    priced = replace(verdict, trials=[replace(trial, output_tok_s=100.0) for trial in verdict.trials])
    assert ResultConfig(usd_per_hour=3.6).price_at(priced) == pytest.approx(10.0)


@pytest.mark.parametrize("over", ["rate", "concurrency"])
def test_no_trial_asks_what_an_earlier_one_asked(monkeypatch: pytest.MonkeyPatch, over: str) -> None:
    """The server's prefix cache has the prompts of earlier trials, which would make each one easier than the last."""
    asked: list[list[str]] = []

    def run(_: RunConfig, __: Target, load: ClosedLoop | OpenLoop, ___: Workload) -> LoadRun:
        sessions = load.sessions if isinstance(load, ClosedLoop) else (session for _, session in load.timed)
        asked.append([str(session.turns[0].messages) for session in itertools.islice(sessions, 20)])
        return LoadRun(records=[record(float(number), 0.1) for number in range(20)])

    monkeypatch.setattr(RunConfig, "run", run)
    settings, arrival = SearchConfig(start=4), ArrivalConfig(rate=4.0 if over == "rate" else None)
    target, aim = RunConfig(), Target("http://127.0.0.1:1", "m")
    try_level = trier(settings.with_arrival(arrival), arrival, WorkloadConfig(), target, aim)
    for number in range(3):
        try_level(4.0, number)
    prompts = [prompt for trial in asked for prompt in trial]
    assert len(set(prompts)) == len(prompts) == 60


def record(sent: float, ttft: float, tpot: float = 0.01, error: str | None = None) -> BenchRecord:
    times = [sent + ttft + n * tpot for n in range(4)]
    return BenchRecord(sent_s=sent, times_s=times, end_s=times[-1], output_tokens=4, error=error)


def test_a_growing_queue_fails_even_within_the_limits() -> None:
    limits = parse_limits("ttft_p95=10s")
    steady = [record(n * 0.1, 0.5 + 0.1 * (n % 3)) for n in range(80)]
    growing = [record(n * 0.1, 0.1 + 0.05 * n) for n in range(80)]
    assert not queue_grows(steady, 10) and queue_grows(growing, 10)
    rates = {"output_tok_s": 0.0, "requests_s": 0.0}
    assert judge(1, steady, limits, rates).passed
    assert judge(1, growing, limits, rates).reason == "the queue grows"


def test_limits_and_failures_are_named() -> None:
    rates = {"output_tok_s": 0.0, "requests_s": 0.0}
    records = [record(n, 0.2, 0.02 if n < 18 else 0.3) for n in range(20)]
    trial = judge(2, records, parse_limits("ttft_p95=1s,tpot_p95=100ms"), rates)
    assert not trial.passed and trial.reason.startswith("tpot_p95=100ms is 300")
    assert judge(2, records, parse_limits("tpot_p50=100ms"), rates).passed
    failed = [*records, record(30, 0.1, error="http_503")]
    assert "http_503" in judge(2, failed, parse_limits("ttft_p95=1s"), rates).reason
    one_piece = [BenchRecord(times_s=[0.1], end_s=0.1)] * 9
    with pytest.raises(InvalidConfig, match=r"tpot has no values.*more tokens"):
        judge(2, one_piece, parse_limits("ttft_p95=1s,tpot_p95=100ms"), rates)
    with pytest.raises(InvalidConfig, match=r"no request came.*--trial-s"):
        judge(0.01, [], parse_limits("ttft_p95=1s"), rates)
    with pytest.raises(InvalidConfig, match=r"10\.5; it is an integer"):
        SearchSettings(most=10.5)


def test_limits_in_words() -> None:
    one, two = parse_limits("ttft_p95=1s, tpot_mean=100ms")
    assert (one.metric, one.percentile, one.limit_s) == ("ttft", 95, 1.0)
    assert (two.percentile, two.limit_s) == (None, 0.1)
    for wrong in ("", "ttft", "speed_p95=1s", "ttft_p0=1s", "ttft_q5=1s", "ttft_p95=soon", "ttft_p95=-1s"):
        with pytest.raises(InvalidConfig):
            parse_limits(wrong)
    assert meets(record(0, 0.2, 0.02), parse_goodput("ttft=1s,tpot=50ms,itl=50ms,e2e=1s"))
    assert not meets(record(0, 0.2, 0.06), parse_goodput("tpot=50ms"))
    assert not meets(record(0, 0.2, error="cut"), {})


@pytest.mark.slow
def test_capacity_of_a_shared_machine_is_found(stub: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """A token takes n × 100/37.5 ms: 37 streams are within 100 ms, 38 are not."""
    url = stub(mode="share", ttft=0.01, itl=0.1 / 37.5, tokens=16)
    arguments = ["--slo", "tpot_p95=100ms,ttft_p95=5s", "--waves", "3", "--max-lag-ms", "200", "--warmup", "0"]
    assert main(["bench", "search", "--url", url, *arguments]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert abs(found["best"] - 37) <= 1
