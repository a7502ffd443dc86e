"""The series under the names that vLLM's dashboards, alerts and autoscalers ask for (`--metrics-names vllm`).

The values are the same ones: each row says which of our families a vLLM name shows. Labels are vLLM's too: `model_name`
for the model, `engine` for the number of the core behind it, `finished_reason` for how a request ended.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

PREFIX = "tokenmill_"
VLLM_NAMES = {  # our families, without the prefix ─► vLLM's, without `vllm:`
    "requests": "request_success",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "cached_prompt_tokens": "prompt_tokens_cached",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_seconds": "e2e_request_latency_seconds",
    "queue_time_seconds": "request_queue_time_seconds",
    "prefill_time_seconds": "request_prefill_time_seconds",
    "decode_time_seconds": "request_decode_time_seconds",
    "inference_time_seconds": "request_inference_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
    "request_max_tokens": "request_max_num_generation_tokens",
    "request_num_choices": "request_params_n",
    "step_tokens": "iteration_tokens_total",
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "waiting_by_reason": "num_requests_waiting_by_reason",
    "kv_usage_ratio": "kv_cache_usage_perc",
    "prefix_hits": "prefix_cache_hits",
    "prefix_queries": "prefix_cache_queries",
    "preemptions": "num_preemptions",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_draft_tokens": "spec_decode_num_accepted_tokens",
    "cache_config_info": "cache_config_info",
}
LABELS = {"model": "model_name", "outcome": "finished_reason"}
UNKNOWN_THERE = {"outcome": ("rejected",)}  # values of labels that vLLM does not have


class NamedSeries:
    """A registry that exports series under our names, under vLLM's, or under both."""

    def __init__(self, registry: CollectorRegistry, names: str) -> None:
        self._registry = registry
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            renamed = VLLM_NAMES.get(family.name.removeprefix(PREFIX))
            if self._names != "vllm" or renamed is None:
                yield family
            if self._names != "tokenmill" and renamed is not None:
                yield as_vllm(family, f"vllm:{renamed}")


def as_vllm(family: Metric, name: str) -> Metric:
    """A family under another name, with vLLM's labels."""
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        if any(sample.labels.get(label) in values for label, values in UNKNOWN_THERE.items()):
            continue
        labels = {LABELS.get(label, label): value for label, value in sample.labels.items()}
        suffix = sample.name.removeprefix(family.name)
        renamed.samples.append(Sample(name + suffix, {"engine": "0", **labels}, sample.value, sample.timestamp))
    return renamed
