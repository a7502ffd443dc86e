"""The series as Prometheus' own parser reads them back."""

from __future__ import annotations

from tests.support.metric_values import metric_values
from tokenmill.observe.metrics import EngineState, Metrics, RequestTimes


def _values(metrics: Metrics) -> dict[str, float]:
    return metric_values(metrics.render().decode())


def test_a_finished_request_moves_its_series() -> None:
    metrics = Metrics()
    model = metrics.of("")
    times = RequestTimes(total_s=1.1, queue_s=0.02, first_token_s=0.1)
    model.finish_request("stop", prompt_tokens=12, output_tokens=11, times=times)
    model.finish_request("abort", prompt_tokens=5, output_tokens=0, times=RequestTimes(total_s=0.5))
    model.reject_request()
    values = _values(metrics)
    assert values["tokenmill_requests_total{stop}"] == 1 and values["tokenmill_requests_total{rejected}"] == 1
    assert values["tokenmill_requests_total{error}"] == 0
    assert values["tokenmill_prompt_tokens_total"] == 17 and values["tokenmill_generation_tokens_total"] == 11
    assert values["tokenmill_time_to_first_token_seconds_count"] == 1
    assert abs(values["tokenmill_time_per_output_token_seconds_sum"] - 0.1) < 1e-9
    assert values["tokenmill_request_seconds_count"] == 2 and values["tokenmill_queue_time_seconds_count"] == 1


def test_answers_side_by_side_are_not_faster() -> None:
    metrics = Metrics()
    model = metrics.of("")
    times = RequestTimes(total_s=1.1, first_token_s=0.1)
    model.finish_request("stop", prompt_tokens=12, output_tokens=44, times=times, num_answers=4)
    model.finish_request("stop", prompt_tokens=12, output_tokens=4, times=times, num_answers=4)
    values = _values(metrics)
    assert abs(values["tokenmill_time_per_output_token_seconds_sum"] - 0.1) < 1e-9
    assert values["tokenmill_time_per_output_token_seconds_count"] == 1


def test_an_engine_that_overtook_its_predecessor_counts_whole() -> None:
    metrics = Metrics()
    model = metrics.of("")
    model.set_engine(EngineState(0, 0, 0.0, 5, 9, 0, steps=7))
    model.engine_restarted()
    model.set_engine(EngineState(0, 0, 0.0, 6, 9, 0, steps=8))
    values = _values(metrics)
    assert values["tokenmill_engine_steps_total"] == 15 and values["tokenmill_prefix_hits_total"] == 11


def test_engine_totals_survive_a_restart() -> None:
    metrics = Metrics()
    model = metrics.of("")
    model.set_engine(EngineState(3, 2, 0.5, prefix_hits=100, prefix_queries=200, preemptions=1, steps=7, busy_s=0.5))
    model.set_engine(EngineState(1, 0, 0.1, prefix_hits=10, prefix_queries=20, preemptions=0, steps=2, busy_s=0.25))
    model.set_engine(EngineState(1, 0, 0.1, 10, 20, 0, steps=2, busy_s=0.25, drafted=9, accepted=6))
    model.engine_restarted()
    values = _values(metrics)
    assert values["tokenmill_draft_tokens_total"] == 9 and values["tokenmill_accepted_draft_tokens_total"] == 6
    assert values["tokenmill_prefix_hits_total"] == 110 and values["tokenmill_prefix_queries_total"] == 220
    assert values["tokenmill_preemptions_total"] == 1 and values["tokenmill_engine_restarts_total"] == 1
    assert values["tokenmill_engine_steps_total"] == 9 and values["tokenmill_engine_busy_seconds_total"] == 0.75
    assert values["tokenmill_requests_running"] == 1 and values["tokenmill_kv_usage_ratio"] == 0.1


def test_two_sets_of_series_do_not_meet() -> None:
    one, other = Metrics(model="a"), Metrics(model="b")
    one.of("a").reject_request()
    assert _values(other)["tokenmill_requests_total{rejected}"] == 0
    assert 'tokenmill_model_info{model="b"} 1.0' in other.render().decode()
    assert 'tokenmill_requests_total{model="a",outcome="rejected"} 1.0' in one.render().decode()


def test_each_model_has_its_series() -> None:
    metrics = Metrics(model="a")
    metrics.of("a").set_engine(EngineState(1, 0, 0.5, 0, 0, 0, steps=7))
    metrics.of("b").set_engine(EngineState(2, 0, 0.0, 0, 0, 0, steps=3))
    metrics.of("b").engine_unloaded(EngineState(0, 0, 0.25, 0, 0, 0, steps=5))
    metrics.of("b").set_engine(EngineState(0, 0, 0.0, 0, 0, 0, steps=6))  # a new engine, which overtook the old one
    rendered = metrics.render().decode()
    for line in (
        'tokenmill_engine_steps_total{model="a"} 7.0',
        'tokenmill_requests_running{model="a"} 1.0',
        'tokenmill_engine_steps_total{model="b"} 11.0',
        'tokenmill_kv_usage_ratio{model="b"} 0.0',
        'tokenmill_model_unloads_total{model="b"} 1.0',
        'tokenmill_engine_restarts_total{model="b"} 0.0',
    ):
        assert line in rendered
