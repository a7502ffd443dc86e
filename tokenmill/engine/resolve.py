"""`auto` settled: one pure function from what was asked, the model and the machine to a complete config.

Returns the new config and the reasons in words, which are printed at start. Nothing is probed or allocated here.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.arch.precision import ComputeDType, gpu_dtype, is_small
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.config.engine import MAX_AUTO_CONTEXT, default_limits
from tokenmill.engine.speculation import resolve_mode
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import KVLayout
from tokenmill.runner.memory import (
    GPU_START_BYTES,
    RunnerBytes,
    RunnerLimits,
    blocks_for_context,
    num_blocks_that_fit,
    runner_bytes,
)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
# Measured: docs/performance.md.
COST = "25 % of throughput, 16 % of a single sequence's speed, 23 % of prefill (8B shape, H200)"
STEADY = f"deterministic: a request's tokens do not depend on what else is in the batch; it costs about {COST}"
FASTEST = (
    "sums in the fastest order: the last bits of a request's logits may change with its batch "
    f"(--deterministic: never, for about {COST})"
)


@dataclass(frozen=True)
class MachineFacts:
    """What must be known of the machine to settle a config."""

    cores: int
    available_bytes: int  # for weights and KV cache together, on the device that runs the model
    weight_bytes: int  # what the weights will take there
    has_cuda: bool = False
    has_words: bool = False  # matrices that large steps expand
    native_reason: str | None = "native kernels are not built"  # why they can't run this model; None: they can
    unused_gpu: str | None = None  # why torch does not compute on a GPU that is there


@dataclass(frozen=True)
class Resolved:
    config: EngineConfig
    reasons: list[str]


def resolve(config: EngineConfig, spec: ModelSpec, layout: KVLayout, machine: MachineFacts) -> Resolved:
    _require_ranges(config)
    reasons: list[str] = []
    ops = _resolve_ops(config.ops, spec, machine, reasons)
    config = replace(config, scheduler=_resolve_scheduler(config.scheduler, ops, machine, reasons))
    model = _resolve_model(config.model, spec, ops, reasons)
    cache = _resolve_cache(config, spec, model, _auto_kv_dtype(spec, model, ops), layout, machine, reasons)
    model = _within_pool(model, cache, layout, reasons)
    mode, reason = resolve_mode(config.scheduler.speculate, ops.device)
    reasons += [reason, f"context of {model.max_context:,} tokens"]
    scheduler = replace(config.scheduler, speculate=mode)
    return Resolved(replace(config, model=model, cache=cache, scheduler=scheduler, ops=ops), reasons)


def _require_ranges(config: EngineConfig) -> None:
    for name, value, low, high in (
        ("max_context", config.model.max_context, 1, 2**31),
        ("block_size", config.cache.block_size, 1, 1024),
        ("num_blocks", config.cache.num_blocks, 2, 2**31),
        ("memory_fraction", config.cache.memory_fraction, 0.001, 1.0),
        ("context_keep", config.cache.context_keep, 0, 2**31),
        ("max_running", config.scheduler.max_running, 1, 4096),
        ("token_budget", config.scheduler.token_budget, 1, 2**20),
        ("max_waiting", config.scheduler.max_waiting, 0, sys.maxsize),
        ("threads", config.ops.threads, 1, 1024),
    ):
        if value is not None and not low <= value <= high:
            raise InvalidConfig(f"{name} must be between {low} and {high}, got {value}", param=name)


def _resolve_ops(ops: OpsConfig, spec: ModelSpec, machine: MachineFacts, reasons: list[str]) -> OpsConfig:
    device = ops.device if ops.device != "auto" else ("cuda" if machine.has_cuda else "cpu")
    if device == "cuda" and not machine.has_cuda:
        told = "device cuda was asked for, but torch sees no CUDA device"
        raise InvalidConfig(told, param="device", hint=machine.unused_gpu or "tokenmill doctor shows what is here")
    backend = ops.backend
    if backend == "auto":
        backend = "triton" if device == "cuda" else ("cpu" if machine.native_reason is None else "reference")
        why = f" ({machine.native_reason})" if backend == "reference" else ""
        reasons.append(f"device {device}, backend {backend}{why}")
    if ops.device == "auto" and device == "cpu" and machine.unused_gpu is not None:
        reasons.append(machine.unused_gpu)
    if backend == "cpu" and machine.native_reason is not None:
        raise InvalidConfig(f"backend cpu was asked for, but {machine.native_reason}", param="backend")
    if device == "cuda":
        reasons.append(STEADY if ops.deterministic else FASTEST)
    bits = ops.activation_bits
    if bits == "auto":
        bits = "mixed" if is_small(spec) else "8"
    return replace(ops, device=device, backend=backend, activation_bits=bits, threads=ops.threads or machine.cores)


def _resolve_model(model: ModelConfig, spec: ModelSpec, ops: OpsConfig, reasons: list[str]) -> ModelConfig:
    on_gpu = ops.device == "cuda"
    dtype = compute_dtype(model, ops, spec, on_gpu=on_gpu)
    if model.dtype == "auto":
        reasons.append(f"computing in {dtype}{_why(dtype, spec) if on_gpu else ''}")
    context = model.max_context
    if context is None:
        context = min(spec.max_context, MAX_AUTO_CONTEXT)
        if context < spec.max_context:
            reasons.append(
                f"the model's context of {spec.max_context} is more than {context}; --max-context asks for it"
            )
    elif context > spec.max_context:
        raise InvalidConfig(f"max_context {context} is more than the model's {spec.max_context}", param="max_context")
    return replace(model, dtype=dtype, max_context=context)


def compute_dtype(model: ModelConfig, ops: OpsConfig, spec: ModelSpec, *, on_gpu: bool) -> ComputeDType:
    if model.dtype != "auto":
        return model.dtype
    in_halves = model.quantization != "none" or ops.deterministic
    return gpu_dtype(spec, in_halves=in_halves) if on_gpu else "float32"


def _why(dtype: str, spec: ModelSpec) -> str:
    if dtype == "float32":
        return ", as so small a model's answers change visibly in 16 bits (--dtype bfloat16: prompts twice as fast)"
    if spec.dtype == "float32":
        return ", rounded from the file's float32 (--dtype float32 computes with all of it, more slowly)"
    return ""


def _resolve_scheduler(
    scheduler: SchedulerConfig, ops: OpsConfig, machine: MachineFacts, reasons: list[str]
) -> SchedulerConfig:
    rows, tokens = default_limits(machine.available_bytes if ops.device == "cuda" else None)
    rows = rows if scheduler.max_running is None else scheduler.max_running
    tokens = max(rows, tokens) if scheduler.token_budget is None else scheduler.token_budget
    reasons.append(f"at most {rows} sequences and {tokens} tokens a step")
    return replace(scheduler, max_running=rows, token_budget=tokens)


def _auto_kv_dtype(spec: ModelSpec, model: ModelConfig, ops: OpsConfig) -> str:
    """Native kernels compute in float32 but need not remember in it: beside weights that were rounded themselves, keys
    and values of 11 bits are not seen in the answers, and half as many bytes are read."""
    is_rounded = spec.dtype != "float32" or model.quantization != "none"
    return "float16" if ops.backend == "cpu" and is_rounded else model.dtype


def _resolve_cache(
    config: EngineConfig,
    spec: ModelSpec,
    model: ModelConfig,
    auto_kv_dtype: str,
    layout: KVLayout,
    machine: MachineFacts,
    reasons: list[str],
) -> CacheConfig:
    cache = config.cache
    kv_dtype: Any = cache.kv_dtype if cache.kv_dtype != "auto" else auto_kv_dtype
    assert kv_dtype != "auto" and model.max_context is not None
    fraction = cache.memory_fraction or (0.9 if machine.has_cuda else 0.25)
    cache = replace(cache, kv_dtype=kv_dtype, memory_fraction=fraction)
    if cache.num_blocks is not None:
        return cache
    block_bytes = layout.block_bytes(cache.block_size, kv_dtype)
    rows, tokens = config.scheduler.num_rows, config.scheduler.num_tokens
    beside = machine.weight_bytes
    if machine.has_cuda:
        planned = planned_bytes(spec, replace(config, model=model, cache=cache), has_words=machine.has_words)
        beside += planned.total + GPU_START_BYTES
        reasons.append(
            f"memory: weights {machine.weight_bytes / 2**30:.2f} GiB, rows {planned.rows / 2**30:.2f}, largest step "
            f"{planned.step / 2**30:.2f}, graphs {planned.graphs / 2**30:.2f}"
        )
    num_blocks = num_blocks_that_fit(
        layout,
        free_bytes=max(0, machine.available_bytes - beside),
        memory_fraction=fraction,
        block_size=cache.block_size,
        block_bytes=block_bytes,
        max_context=model.max_context,
        max_rows=rows,
        max_chunk=tokens,
    )
    tokens = num_blocks * cache.block_size // len(layout.groups)
    gib = num_blocks * block_bytes / 2**30
    reasons.append(f"KV cache of {kv_dtype}: {num_blocks:,} blocks, {gib:.2f} GiB, about {tokens:,} tokens")
    return replace(cache, num_blocks=num_blocks)


def planned_bytes(spec: ModelSpec, config: EngineConfig, *, has_words: bool) -> RunnerBytes:
    """What a GPU's runner takes beside weights and pool; the config is settled but for its pool."""
    model, scheduler = config.model, config.scheduler
    assert model.max_context is not None
    return runner_bytes(
        spec,
        RunnerLimits(
            scheduler.num_rows,
            scheduler.num_tokens,
            model.max_context,
            config.cache.block_size,
            DTYPE_BYTES[model.dtype],
            has_words=has_words,
        ),
    )


def _within_pool(model: ModelConfig, cache: CacheConfig, layout: KVLayout, reasons: list[str]) -> ModelConfig:
    """One sequence must fit the pool alone, or it could never finish."""
    assert model.max_context is not None and cache.num_blocks is not None
    longest = longest_context(layout, cache, model.max_context)
    if not longest:
        least = 1 + len(layout.groups)
        raise InvalidConfig(
            f"num_blocks must be at least {least} for this model, got {cache.num_blocks}", param="num_blocks"
        )
    if longest < model.max_context:
        reasons.append(f"context cut to {longest:,} tokens, which is what the KV cache holds")
    return replace(model, max_context=longest)


def longest_context(layout: KVLayout, cache: CacheConfig, limit: int) -> int:
    """The longest context whose blocks fit the pool (one block of it is the null block)."""
    assert cache.num_blocks is not None
    whole_blocks = range(1, -(-limit // cache.block_size) + 1)
    fitting = bisect_right(
        whole_blocks,
        cache.num_blocks - 1,
        key=lambda n: blocks_for_context(layout, n * cache.block_size, cache.block_size, limit),
    )
    return min(limit, fitting * cache.block_size)
