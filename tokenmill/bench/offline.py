"""Benchmark of the engine without a server: prefill and decode speed with 1, 4, 16 ... sequences at once.

For each concurrency C two sets of C requests run, each after a warm-up:

    prefill   C prompts, one token out                 tokens/s  =  C × input_len / time until the last first token
    decode    C prompts, output_len tokens out         tokens/s  =  C / step, over the steps in which all C only decode

and with `num_requests` one more run: all requests at once through the scheduler, as a batch job would.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.arch.cost import WeightParts, decode_flops, kv_bytes, prefill_flops, weights_read_bytes
from tokenmill.arch.spec import ModelSpec
from tokenmill.bench.engine_steps import StepRun, drive, model_clock, random_requests
from tokenmill.bench.measures import median, summarize
from tokenmill.bench.traffic import Lengths
from tokenmill.bench.utilisation import Peaks
from tokenmill.config import EngineConfig
from tokenmill.engine.backends import StoredWeights, find_backend, find_device
from tokenmill.engine.llm import LLM
from tokenmill.engine.resolve import choose_device, compute_request, probe
from tokenmill.errors import InvalidConfig

WARMUP_TOKENS = 4


@dataclass(frozen=True)
class OfflineWorkload:
    input_len: Lengths
    output_len: Lengths
    concurrency: tuple[int, ...]
    num_requests: int = 0
    seed: int = 1
    rounds: int = 1

    @property
    def longest(self) -> int:
        return self.input_len.high + self.output_len.high


@dataclass(frozen=True)
class Measured:
    """The model under test, and what is needed to count its bytes and operations."""

    llm: LLM
    spec: ModelSpec
    parts: WeightParts
    kv_dtype: str
    weight_dtype: str
    device: str


def config_for(config: EngineConfig, workload: OfflineWorkload) -> EngineConfig:
    """Return a config with room for exactly the largest concurrency and the longest request, unless the user set
    limits.

    `auto` speculation is turned off: it would measure how repetitive the answers to random prompts are.
    """
    most = max((*workload.concurrency, 1))
    model, scheduler = config.model, config.scheduler
    if model.max_context is None:
        model = replace(model, max_context=workload.longest + 1)
    if most > (scheduler.max_running or rows_by_default(config)):
        scheduler = replace(scheduler, max_running=most)
    if scheduler.speculate == "auto":
        scheduler = replace(scheduler, speculate="off")
    return replace(config, model=model, scheduler=scheduler)


def rows_by_default(config: EngineConfig) -> int:
    """Return the engine's default number of sequences at once."""
    machine = probe(config)
    device = choose_device(config.ops, machine)
    return device.limits(machine.free_bytes[device.name])[0]


def open_measured(config: EngineConfig) -> Measured:
    llm = LLM(config)
    while llm.core.run_idle_task():  # a GPU's graphs of every size: a server has captured them soon after its start
        pass
    parts, dtype = stored_weights(llm)
    return Measured(llm, llm.frontend.spec, parts, llm.core.info.kv_dtype, dtype, llm.core.info.device)


def stored_weights(llm: LLM) -> tuple[WeightParts, str]:
    """Return the bytes of the weights as the engine keeps them, and the dtype of most of them."""
    path, config, spec = llm.frontend.model_path, llm.config, llm.frontend.spec
    is_random = config.model.load_format == "dummy"
    backend, stored = find_backend(llm.core.info.backend), StoredWeights(spec, None if is_random else path)
    request = compute_request(config, spec, find_device(llm.core.info.device), backend)
    kept = backend.kept_weights(stored, request)
    return kept.parts, kept.dtype


# ── the runs ───────────────────────────────────────────────────────────────────────────────────────────


def measure_concurrency(m: Measured, workload: OfflineWorkload, concurrency: int, round_number: int) -> dict[str, Any]:
    rng = random.Random(f"{workload.seed}/{concurrency}/{round_number}")
    inputs = workload.input_len.draw_many(rng, concurrency)
    outputs = [max(2, n) for n in workload.output_len.draw_many(rng, concurrency)]
    _run(m, inputs[:1], [min(WARMUP_TOKENS, outputs[0])], workload.seed, f"warm-{concurrency}-{round_number}")
    prefill = _run(m, inputs, [1] * concurrency, workload.seed, f"prefill-{concurrency}-{round_number}")
    decode = None
    if workload.output_len.high > 1:
        decode = _run(m, inputs, outputs, workload.seed, f"decode-{concurrency}-{round_number}")
    return figures(m, concurrency, inputs, prefill, decode)


def _run(m: Measured, inputs: Sequence[int], outputs: Sequence[int], seed: int, name: str) -> StepRun:
    """Run one set of requests. On a GPU the model is not timed: waiting for it would remove the overlap being
    measured."""
    requests = random_requests(inputs, outputs, m.spec.vocab_size, seed=seed, name=name)
    if m.device == "cuda":
        return drive(m.llm.core, requests)
    with model_clock(m.llm.core) as clock:
        return drive(m.llm.core, requests, clock)


def figures(
    m: Measured, concurrency: int, inputs: Sequence[int], prefill: StepRun, decode: StepRun | None
) -> dict[str, Any]:
    prompt_flops = sum(prefill_flops(m.spec, length) for length in inputs)
    found: dict[str, Any] = {
        "concurrency": concurrency,
        "input_len": sum(inputs) / len(inputs),
        "input_tokens": sum(inputs),
        "prefill_tok_s": sum(inputs) / prefill.elapsed_s,
        "prefill_s": prefill.elapsed_s,
        "prefill_flops_s": prompt_flops / prefill.elapsed_s,
        "ttft_first_s": min(prefill.first_token_s),
        "ttft_last_s": max(prefill.first_token_s),
    }
    return found | (decode_figures(m, concurrency, inputs, decode) if decode else {"decode_tok_s": None})


def decode_figures(m: Measured, concurrency: int, inputs: Sequence[int], run: StepRun) -> dict[str, Any]:
    steps = run.full_decode
    if not steps:
        raise InvalidConfig(
            f"no step decoded all {concurrency} sequences together", param="output_len", hint="ask for longer answers"
        )
    total_s = sum(step.step_s for step in steps)
    mean_s, context = total_s / len(steps), int(sum(inputs) / len(inputs)) + len(steps) // 2
    step_bytes = weights_read_bytes(m.spec, m.parts, concurrency) + concurrency * kv_bytes(m.spec, m.kv_dtype, context)
    summary = summarize([step.step_s for step in steps])
    assert summary is not None
    return {
        "decode_tok_s": sum(step.num_new_tokens for step in steps) / total_s,
        "decode_steps": len(steps),
        "decode_step_ms": mean_s * 1e3,
        "decode_step_ms_p50": summary.p50 * 1e3,
        "decode_step_ms_p99": summary.p99 * 1e3,
        "decode_context": context,
        "decode_step_bytes": step_bytes,
        "decode_bytes_s": step_bytes / mean_s,
        "decode_flops_s": concurrency * decode_flops(m.spec, context) / mean_s,
        **host_figures(run, concurrency),
    }


def host_figures(run: StepRun, concurrency: int) -> dict[str, Any]:
    """Return the host time of a step besides the model; None where the model was not timed."""
    host_s = [step.host_s for step in run.full_decode if step.host_s is not None]
    return {
        "host_ms_per_step": median(host_s) * 1e3 if host_s else None,
        "host_ms_allowed": 1.0 + 0.02 * concurrency,
    }


def measure_throughput(m: Measured, workload: OfflineWorkload) -> dict[str, Any]:
    """Measure all requests at once, as in a batch job. Input lengths are drawn first, then output lengths."""
    rng = random.Random(workload.seed)
    inputs = workload.input_len.draw_many(rng, workload.num_requests)
    outputs = workload.output_len.draw_many(rng, workload.num_requests)
    _run(m, inputs[:1], [min(WARMUP_TOKENS, outputs[0])], workload.seed, "warm-all")
    run = _run(m, inputs, outputs, workload.seed, "all")
    return {
        "num_requests": workload.num_requests,
        "input_tokens": sum(inputs),
        "output_tokens": run.num_output_tokens,
        "elapsed_s": run.elapsed_s,
        "requests_s": workload.num_requests / run.elapsed_s,
        "output_tok_s": run.num_output_tokens / run.elapsed_s,
        "total_tok_s": (sum(inputs) + run.num_output_tokens) / run.elapsed_s,
        "steps": len(run.steps),
    }


def in_turns(
    m: Measured, workloads: Sequence[OfflineWorkload], tell: Callable[[dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Measure every workload at every concurrency; each figure is the median of the rounds.

    A round visits all of them before the next begins, so that a slow minute of the machine affects a round and not one
    of the concurrencies.
    """
    points = [(workload, concurrency) for workload in workloads for concurrency in workload.concurrency]
    found: list[list[dict[str, Any]]] = [[] for _ in points]
    for number in range(workloads[0].rounds):
        for rounds, (workload, concurrency) in zip(found, points, strict=True):
            rounds.append(measure_concurrency(m, workload, concurrency, number))
            if tell is not None:
                tell(rounds[-1])
    return [median_of_rounds(rounds) for rounds in found]


def median_of_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Take the median of each figure over several rounds of one measurement."""
    if len(rounds) == 1:
        return dict(rounds[0])
    return {
        key: median([r[key] for r in rounds]) if isinstance(value, float) else value for key, value in rounds[0].items()
    }


def against_peaks(result: dict[str, Any], peaks: Peaks | None) -> dict[str, Any]:
    """Add the figures as shares of the machine's peaks."""
    if peaks is None:
        return result
    result["prefill_mfu"] = result["prefill_flops_s"] / peaks.flops
    if result["decode_tok_s"] is not None:
        result["decode_mbu"] = result["decode_bytes_s"] / peaks.bandwidth_bytes_s
        result["decode_mfu"] = result["decode_flops_s"] / peaks.flops
    return result
