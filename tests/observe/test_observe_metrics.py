"""The series as Prometheus' own parser reads them back."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.metric_values import metric_values
from tokenmill.hardware.power import PowerMeter
from tokenmill.observe.metrics import EngineState, Metrics, RequestSize, RequestTimes


def _values(metrics: Metrics) -> dict[str, float]:
    return metric_values(metrics.render().decode())


def test_a_finished_request_moves_its_series() -> None:
    metrics = Metrics()
    model = metrics.of("")
    times = RequestTimes(total_s=1.1, queue_s=0.02, first_token_s=0.1)
    model.finish_request("stop", RequestSize(prompt_tokens=12, output_tokens=11, cached_tokens=4, max_tokens=64), times)
    model.finish_request("abort", RequestSize(prompt_tokens=5), RequestTimes(total_s=0.5))
    model.reject_request()
    values = _values(metrics)
    assert values["tokenmill_requests_total{stop}"] == 1 and values["tokenmill_requests_total{rejected}"] == 1
    assert values["tokenmill_requests_total{error}"] == 0
    assert values["tokenmill_prompt_tokens_total"] == 17 and values["tokenmill_generation_tokens_total"] == 11
    assert values["tokenmill_time_to_first_token_seconds_count"] == 1
    assert abs(values["tokenmill_time_per_output_token_seconds_sum"] - 0.1) < 1e-9
    assert values["tokenmill_request_seconds_count"] == 2 and values["tokenmill_queue_time_seconds_count"] == 1
    assert abs(values["tokenmill_prefill_time_seconds_sum"] - 0.08) < 1e-9
    assert abs(values["tokenmill_inference_time_seconds_sum"] - 1.08) < 1e-9
    assert values["tokenmill_cached_prompt_tokens_total"] == 4
    assert values["tokenmill_request_max_tokens_sum"] == 64 and values["tokenmill_request_max_tokens_count"] == 1


def test_answers_side_by_side_are_not_faster() -> None:
    metrics = Metrics()
    model = metrics.of("")
    times = RequestTimes(total_s=1.1, first_token_s=0.1)
    model.finish_request("stop", RequestSize(prompt_tokens=12, output_tokens=44, num_answers=4), times)
    model.finish_request("stop", RequestSize(prompt_tokens=12, output_tokens=4, num_answers=4), times)
    values = _values(metrics)
    assert abs(values["tokenmill_time_per_output_token_seconds_sum"] - 0.1) < 1e-9
    assert values["tokenmill_time_per_output_token_seconds_count"] == 1


def test_totals_go_on_where_a_process_was_started_again() -> None:
    metrics = Metrics()
    model = metrics.of("")
    model.set_engine(EngineState(0, 0, 0.0, 5, 9, 0, steps=7))
    model.engine_restarted()
    model.set_engine(EngineState(0, 0, 0.0, 6, 9, 0, steps=8))
    values = _values(metrics)
    assert values["tokenmill_engine_steps_total"] == 8 and values["tokenmill_prefix_hits_total"] == 6


def test_engine_totals_survive_a_restart() -> None:
    metrics = Metrics()
    model = metrics.of("")
    model.set_engine(EngineState(3, 2, 0.5, prefix_hits=100, prefix_queries=200, preemptions=1, steps=7, busy_s=0.5))
    model.set_engine(EngineState(1, 0, 0.1, prefix_hits=10, prefix_queries=20, preemptions=0, steps=2, busy_s=0.25))
    model.set_engine(EngineState(1, 0, 0.1, 10, 20, 0, steps=2, failed_steps=4, busy_s=0.25, drafted=9, accepted=6))
    model.engine_restarted()
    values = _values(metrics)
    assert values["tokenmill_draft_tokens_total"] == 9 and values["tokenmill_accepted_draft_tokens_total"] == 6
    assert values["tokenmill_prefix_hits_total"] == 110 and values["tokenmill_prefix_queries_total"] == 220
    assert values["tokenmill_preemptions_total"] == 1 and values["tokenmill_engine_restarts_total"] == 1
    assert values["tokenmill_engine_steps_total"] == 9 and values["tokenmill_engine_busy_seconds_total"] == 0.75
    assert values["tokenmill_engine_failed_steps_total"] == 4
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


# Every series that the queries of vLLM's own Grafana dashboards name.
VLLM_SERIES = [
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count",
    "inter_token_latency_seconds_bucket",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
    "prompt_tokens_total",
    "generation_tokens_total",
    "iteration_tokens_total_bucket",
    "iteration_tokens_total_sum",
    "iteration_tokens_total_count",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_bucket",
    "request_max_num_generation_tokens_sum",
    "request_success_total",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "num_preemptions_total",
    "num_requests_waiting_by_reason",
    "cache_config_info",
]


def test_the_same_values_under_vllms_names() -> None:
    shown = {}
    for names in ("tokenmill", "vllm", "both"):
        metrics = Metrics(names=names)
        model = metrics.of("m")
        model.finish_request("stop", RequestSize(prompt_tokens=12, output_tokens=3, max_tokens=9), RequestTimes(1.0))
        counts = tuple(2 * (place == 1) for place in range(16))
        model.set_engine(EngineState(1, 3, 0.5, 5, 9, 2, waiting_for_grammar=1, step_counts=counts, step_tokens=4))
        model.set_cache_config(16, 512)
        model.gaps.add(0.02)
        shown[names] = metrics.render().decode()
    found = {sample.name: sample for sample in samples(shown["vllm"])}
    assert not [name for name in VLLM_SERIES if f"vllm:{name}" not in found]
    assert found["vllm:prompt_tokens_total"].labels == {"model_name": "m", "engine": "0"}
    assert found["vllm:iteration_tokens_total_sum"].value == 4 and found["vllm:iteration_tokens_total_count"].value == 2
    assert found["vllm:cache_config_info"].labels["block_size"] == "16"
    reasons = {
        one.labels["finished_reason"] for one in samples(shown["vllm"]) if one.name == "vllm:request_success_total"
    }
    assert reasons == {"stop", "length", "abort", "error"}
    waiting = {one.labels["reason"]: one.value for one in samples(shown["both"]) if "waiting_by_reason" in one.name}
    assert waiting == {"capacity": 2, "grammar": 1, "loading": 0}
    assert "vllm:" not in shown["tokenmill"] and "tokenmill_prompt_tokens" not in shown["vllm"]
    assert {"vllm:prompt_tokens_total", "tokenmill_prompt_tokens_total"} <= {one.name for one in samples(shown["both"])}
    assert "tokenmill_event_loop_lag_seconds_count" in shown["vllm"], "what vLLM does not have keeps its name"


def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def test_steps_are_counted_across_a_restart() -> None:
    metrics = Metrics()
    model = metrics.of("")
    for counts, tokens in (((1, 2), 9), ((1, 4), 17), ((2, 0), 2)):  # then a new engine, noticed by its smaller counts
        padded = (*counts, *(0,) * 14)
        model.set_engine(EngineState(0, 0, 0.0, 0, 0, 0, step_counts=padded, step_tokens=tokens))
    values = _values(metrics)
    assert values["tokenmill_step_tokens_count"] == 7 and values["tokenmill_step_tokens_sum"] == 19
    assert values["tokenmill_step_tokens_bucket{1.0}"] == 3 and values["tokenmill_step_tokens_bucket{+Inf}"] == 7


def test_power_is_read_where_the_machine_tells(tmp_path: Path) -> None:
    counter = tmp_path / "intel-rapl:0" / "energy_uj"
    counter.parent.mkdir()
    counter.write_text("5000000\n")
    now_s = [10.0]
    meter = PowerMeter(tmp_path, FakeNvml(), clock=lambda: now_s[0])
    assert meter.watts() == {"gpu0": 250.0}
    now_s[0] += 2.0
    counter.write_text("65000000\n")
    assert meter.watts() == {"gpu0": 250.0, "cpu0": 30.0}
    now_s[0] += 2.0
    counter.write_text("7\n")
    assert meter.watts()["cpu0"] == 30.0, "the counter began anew"


class FakeNvml(ctypes.CDLL):
    """One GPU at 250 W."""

    def __init__(self) -> None:
        pass

    def nvmlInit_v2(self) -> int:  # noqa: N802 - the library's names
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetPowerUsage(self, device: Any, milliwatts: Any) -> int:  # noqa: N802
        milliwatts._obj.value = 250_000
        return 0
