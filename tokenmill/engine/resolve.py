"""Resolving `auto` settings: from the requested settings, the model and the machine to a complete config with reasons.

`probe` inspects the machine once; `resolve` is a pure function that walks the rows of `backends.py` and allocates
nothing. Its reasons are printed at start and by `tokenmill doctor`.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from tokenmill.arch.cost import DTYPE_BYTES, ComputeDType, WeightParts, is_small
from tokenmill.arch.packed_formats import dummy_formats, stored_formats
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.config.engine import MAX_AUTO_CONTEXT, USUAL_BLOCK_SIZE
from tokenmill.engine.adapter_room import resolve_adapters
from tokenmill.engine.backends import BACKENDS, DEVICES, Backend, Device, KeptWeights, StoredWeights
from tokenmill.engine.mtp_room import MTP, mtp_block_bytes, mtp_bytes
from tokenmill.engine.resolve_ranks import MAX_RANKS, heaviest_rank, ranks_of_a_device, resolve_parallel
from tokenmill.engine.stage_ring import stage_bytes
from tokenmill.errors import InvalidConfig
from tokenmill.hardware.gpu import Gpu
from tokenmill.hardware.machine import probe_machine
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.lora.sizes import MAX_RANK
from tokenmill.ops.compute_request import ComputeRequest
from tokenmill.parallel.cuts import cut_spec
from tokenmill.runner.memory import (
    RunnerBytes,
    RunnerLimits,
    blocks_for_context,
    num_blocks_that_fit,
    num_states_that_fit,
    recurrent_bytes,
)

DRAFT_PREFIX = "draft:"
SPECULATIONS = f"off, auto, ngram, {MTP} or {DRAFT_PREFIX}MODEL"


@dataclass(frozen=True)
class MachineFacts:
    """The facts about the machine that `resolve` needs."""

    cores: int
    free_bytes: Mapping[str, int]  # free memory of each device that torch can use, by its name
    unused_gpu: str | None = None  # why torch can't use a GPU of this machine
    num_gpus: int = 1  # GPUs that torch can use


@dataclass(frozen=True)
class Resolved:
    config: EngineConfig
    reasons: list[str]
    device: Device
    backend: Backend
    refusals: list[str]  # why preferred backends can't compute the model
    workspace: RunnerBytes  # the runner's memory in addition to weights and pool
    slot_values: int = 0  # the most numbers that an adapter may have


def resolve_model_config(config: EngineConfig, spec: ModelSpec, path: Path) -> Resolved:
    """Resolve a config for a model's files on this machine."""
    is_random = config.model.load_format == "dummy"
    formats = dummy_formats(stored_formats(path, spec)) if is_random else None
    stored = StoredWeights(spec, None if is_random else path, formats)
    return resolve(config, spec, probe(config), stored)


def explain_choices(config: EngineConfig, path: Path, spec: ModelSpec) -> list[str]:
    """Return the settings that would be chosen for a model on this machine and the reasons, without loading it."""
    resolved = resolve_model_config(config, spec, path)
    return [*resolved.reasons, resolved.backend.describe_kernels(resolved.config)]


# ── the machine ────────────────────────────────────────────────────────────────────────────────────────


def probe(config: EngineConfig) -> MachineFacts:
    """Inspect the devices that the config allows; others are not opened."""
    machine = probe_machine()
    allowed = [device for device in DEVICES if config.ops.device in ("auto", device.name)]
    free_bytes: dict[str, int] = {device.name: free for device in allowed if (free := device.free_bytes()) is not None}
    unused = next(filter(None, map(unused_gpu, machine.gpus)), None)
    return MachineFacts(machine.cpu.usable_cores, free_bytes, unused, num_gpus() if "cuda" in free_bytes else 0)


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def unused_gpu(gpu: Gpu) -> str | None:
    """Return why torch can't use a GPU of this machine; None if it can."""
    import torch

    platform, built = ("ROCm", torch.version.hip) if gpu.vendor == "amd" else ("CUDA", torch.version.cuda)
    if built is None:
        how = "see https://pytorch.org/get-started/locally for one built with it"
        return f"{gpu.name} is not used: this torch is built without {platform}, {how}"
    if not torch.cuda.is_available():
        return f"{gpu.name} is not used: torch can't open it, its driver may be too old for {platform} {built}"
    return None


# ── the config ─────────────────────────────────────────────────────────────────────────────────────────


def resolve(
    config: EngineConfig,
    spec: ModelSpec,
    machine: MachineFacts,
    stored: StoredWeights,
    backends: Sequence[Backend] = BACKENDS,
) -> Resolved:
    require_ranges(config)
    reasons: list[str] = []
    config = replace(config, cache=replace(config.cache, block_size=resolve_block_size(config.cache, spec, reasons)))
    device = choose_device(config.ops, machine, backends)
    backend, request, refusals = _choose_backend(config, spec, device, backends, reasons)
    parallel = resolve_parallel(config, spec, device, backend, machine.num_gpus, reasons)
    require_usable_tiers(config, spec, device.name)
    ops = _resolve_ops(config.ops, spec, device, backend, machine, reasons, parallel.num_ranks)
    free_bytes = machine.free_bytes[device.name]
    scheduler = _resolve_scheduler(config.scheduler, device, free_bytes, reasons)
    config = replace(config, ops=ops, parallel=parallel, scheduler=scheduler)
    config = replace(config, model=_resolve_model(config.model, spec, device, request, reasons))
    kv_dtype: Any = request.kv_dtype
    fraction = config.cache.memory_fraction or device.memory_fraction
    cache = replace(config.cache, kv_dtype=kv_dtype, memory_fraction=fraction)
    config = replace(config, cache=cache)
    kept = backend.kept_weights(stored, request)
    adapters = resolve_adapters(config.model, spec, int(DTYPE_BYTES[request.dtype]))
    config = replace(config, model=replace(config.model, adapter_slots=adapters.slots, max_adapter_rank=adapters.rank))
    reasons += adapters.reasons
    if adapters.slots and backend.is_slow and device.overlaps_steps:
        problem = f"adapters with backend {backend.name} on {device.name}: its steps can't be captured with them"
        raise InvalidConfig(problem, param="adapter", hint="--backend triton")
    workspace = device.workspace_bytes(spec, _runner_limits(config, kept), 1.0)
    own = cut_spec(spec, parallel.tp, 0, by_heads=not parallel.dp_attention)
    dtypes = CacheDtypes(kv_dtype, config.model.dtype)
    layout = KVLayout.from_spec(own, dtypes)
    layout.rules(cache.tokens_per_block)  # raises if the block size does not fit the model
    has_head = config.scheduler.speculate == MTP
    head_bytes = mtp_bytes(spec, kept.parts, config.scheduler.num_rows) if has_head else 0
    head_block_bytes = mtp_block_bytes(spec, dtypes, cache.tokens_per_block) if has_head else 0
    left_bytes = free_bytes
    if parallel.num_ranks > 1:
        share, layout = heaviest_rank(spec, parallel, layout, cache.tokens_per_block)
        kept = replace(kept, parts=WeightParts(*(int(part * share) for part in astuple(kept.parts))))
        left_bytes //= ranks_of_a_device(parallel)
    if parallel.pp > 1 and device.overlaps_steps:
        left_bytes -= stage_bytes(config, spec)
    left_bytes = max(0, left_bytes - adapters.total_bytes - head_bytes)  # a rank may have all of an adapter
    cache = _size_pool(config, layout, device, kept, workspace, left_bytes, reasons, head_block_bytes)
    model = _within_pool(config.model, cache, layout, config.scheduler.num_tokens, reasons)
    overlaps = "on a GPU" if device.overlaps_steps else "in a pipeline" if parallel.pp > 1 else None
    mode, reason = resolve_speculation(config.scheduler.speculate, overlaps=overlaps)
    if mode == MTP and parallel.num_ranks > 1:
        raise InvalidConfig("speculate mtp is not implemented for several ranks", param="speculate")
    reasons += [reason, f"context of {model.max_context:,} tokens"]
    scheduler = replace(config.scheduler, speculate=mode)
    config = replace(config, model=model, cache=cache, scheduler=scheduler)
    return Resolved(config, reasons, device, backend, refusals, workspace, adapters.slot_values)


def resolve_block_size(cache: CacheConfig, spec: ModelSpec, reasons: list[str]) -> int:
    """Return the block size: the requested one, or the default of this model, with a reason if that is unusual."""
    if cache.block_size is not None:
        return cache.block_size
    block_size = KVLayout.from_spec(spec).default_block_size
    if block_size != USUAL_BLOCK_SIZE:
        reasons.append(f"KV blocks of {block_size} tokens, which the model compresses to one entry")
    return block_size


def require_usable_tiers(config: EngineConfig, spec: ModelSpec, device: str) -> None:
    """Refuse KV tiers that can't work with the other settings."""
    cache = config.cache
    tier_settings = [name for name in ("kv_disk", "kv_disk_gb", "kv_host_gb") if getattr(cache, name)]
    if cache.kv_transfer == "nixl":
        from tokenmill.kv.tiers.nixl import require_installed  # imported only for NIXL

        require_installed()
        tier_settings.append("kv_transfer")
    if not tier_settings:
        return
    first = tier_settings[0]
    if not cache.prefix_caching:
        problem = f"{first} is set, but prefix_caching is off: no stored block would ever be reused"
        raise InvalidConfig(problem, param=first)
    if config.parallel.num_ranks > 1:
        from tokenmill.engine.ranked_blocks import ranked_block_limits  # imported only if there are several ranks

        if limit := ranked_block_limits(config.parallel, spec, device):
            raise InvalidConfig(f"{first} is set, but blocks of this model can't be stored: {limit}", param=first)
    if cache.kv_host_gb and device == "cpu":
        problem = "kv_host_gb is set, but on a CPU the pool is already in host memory"
        raise InvalidConfig(problem, param="kv_host_gb", hint="increase --num-blocks, or use --kv-disk")


def require_ranges(config: EngineConfig) -> None:
    """Refuse numbers outside of what a setting can be."""
    for name, value, low, high in (
        ("max_context", config.model.max_context, 1, 2**31),
        ("block_size", config.cache.block_size, 1, 1024),
        ("num_blocks", config.cache.num_blocks, 2, 2**31),
        ("num_states", config.cache.num_states, 3, 2**31),
        ("memory_fraction", config.cache.memory_fraction, 0.001, 1.0),
        ("kv_disk_gb", config.cache.kv_disk_gb, 0.001, 1e6),
        ("kv_host_gb", config.cache.kv_host_gb, 0.0, 1e6),
        ("context_keep", config.cache.context_keep, 0, 2**31),
        ("max_running", config.scheduler.max_running, 1, 4096),
        ("token_budget", config.scheduler.token_budget, 1, 2**20),
        ("max_waiting", config.scheduler.max_waiting, 0, sys.maxsize),
        ("step_ms", config.scheduler.step_ms, 0.0, 3.6e6),
        ("threads", config.ops.threads, 1, 1024),
        ("tp", config.parallel.tp, 1, MAX_RANKS),
        ("pp", config.parallel.pp, 1, MAX_RANKS),
        ("lanes", config.parallel.lanes, 1, 2 * MAX_RANKS),
        ("expert_copies", config.parallel.expert_copies, 0, 4096),
        ("adapter_slots", config.model.adapter_slots, 0, 1024),
        ("max_adapter_rank", config.model.max_adapter_rank, 1, MAX_RANK),
    ):
        if value is not None and not low <= value <= high:
            raise InvalidConfig(f"{name} must be between {low} and {high}, got {value}", param=name)


def choose_device(ops: OpsConfig, machine: MachineFacts, backends: Sequence[Backend] = BACKENDS) -> Device:
    """Return the first allowed device that is usable and that the selected backend, if any, computes on."""
    named = [device for row in backends if row.name == ops.backend for device in row.devices]
    for device in (*named, *DEVICES):
        if ops.device in ("auto", device.name) and device.name in machine.free_bytes:
            return device
    raise InvalidConfig(
        f"device {ops.device} was requested, but torch sees no {ops.device.upper()} device",
        param="device",
        hint=machine.unused_gpu or "tokenmill doctor lists the devices of this machine",
    )


def _choose_backend(
    config: EngineConfig, spec: ModelSpec, device: Device, backends: Sequence[Backend], reasons: list[str]
) -> tuple[Backend, ComputeRequest, list[str]]:
    """Return the first backend of this device that can compute the model, its compute request, and the refusals of the
    backends before it."""
    requested = config.ops.backend
    refusals: list[str] = []
    for backend in backends:
        is_candidate = requested == backend.name or (requested == "auto" and device in backend.devices)
        if not is_candidate:
            continue
        request = compute_request(config, spec, device, backend)
        refusal = backend.unsupported_reason(request)
        if refusal is None and config.parallel.num_ranks > 1:
            refusal = backend.rank_limits(device)
        if refusal is None:
            if requested == "auto":
                why = f" ({'; '.join(refusals)})" if refusals else ""
                reasons.append(f"device {device.name}, backend {backend.name}{why}")
            return backend, request, refusals
        refusals.append(refusal)
    problem = (
        f"no backend can compute this on {device.name}:"
        if requested == "auto"
        else f"backend {requested} can't be used:"
    )
    raise InvalidConfig(f"{problem} {'; '.join(dict.fromkeys(refusals))}", param="backend")


def compute_request(config: EngineConfig, spec: ModelSpec, device: Device, backend: Backend) -> ComputeRequest:
    """Return the precisions and formats to request of a backend, completed with its defaults."""
    model, kv_dtype = config.model, config.cache.kv_dtype
    dtype = compute_dtype(config, spec, device)
    return ComputeRequest(
        spec=spec,
        device=device.name,
        dtype=dtype,
        kv_dtype=backend.default_kv_dtype(spec, dtype, model.quantization) if kv_dtype == "auto" else kv_dtype,
        block_size=config.cache.tokens_per_block,
        quantization=model.quantization,
        deterministic=config.ops.deterministic,
    )


def compute_dtype(config: EngineConfig, spec: ModelSpec, device: Device) -> ComputeDType:
    model = config.model
    if model.dtype != "auto":
        return model.dtype
    return device.compute_dtype(spec, model.quantization != "none" or config.ops.deterministic)


def _resolve_ops(
    ops: OpsConfig,
    spec: ModelSpec,
    device: Device,
    backend: Backend,
    machine: MachineFacts,
    reasons: list[str],
    num_ranks: int,
) -> OpsConfig:
    if ops.device == "auto" and device is not DEVICES[0] and machine.unused_gpu is not None:
        reasons.append(machine.unused_gpu)
    if device.batch_notes is not None:
        deterministic, fastest = device.batch_notes
        reasons.append(deterministic if ops.deterministic else fastest)
    bits = ops.activation_bits
    if bits == "auto":
        bits = "mixed" if is_small(spec) else "8"
    return replace(
        ops,
        device=device.name,
        backend=backend.name,
        activation_bits=bits,
        threads=ops.threads or max(1, machine.cores // num_ranks),
    )


def _resolve_scheduler(
    scheduler: SchedulerConfig, device: Device, free_bytes: int, reasons: list[str]
) -> SchedulerConfig:
    rows, tokens = device.limits(free_bytes)
    rows = rows if scheduler.max_running is None else scheduler.max_running
    tokens = max(rows, tokens) if scheduler.token_budget is None else scheduler.token_budget
    reasons.append(f"at most {rows} sequences and {tokens} tokens per step")
    return replace(scheduler, max_running=rows, token_budget=tokens)


def _resolve_model(
    model: ModelConfig, spec: ModelSpec, device: Device, request: ComputeRequest, reasons: list[str]
) -> ModelConfig:
    dtype: Any = request.dtype
    if model.dtype == "auto":
        reasons.append(f"computing in {dtype}{device.dtype_note(spec, dtype)}")
    context = model.max_context
    if context is None:
        context = min(spec.max_context, MAX_AUTO_CONTEXT)
        if context < spec.max_context:
            reasons.append(f"context limited to {context} by default; the model has {spec.max_context} (--max-context)")
    elif context > spec.max_context:
        raise InvalidConfig(f"max_context {context} is more than the model's {spec.max_context}", param="max_context")
    return replace(model, dtype=dtype, max_context=context)


def _runner_limits(config: EngineConfig, kept: KeptWeights) -> RunnerLimits:
    assert config.model.max_context is not None
    return RunnerLimits(
        config.scheduler.num_rows,
        config.scheduler.num_tokens,
        config.model.max_context,
        config.cache.tokens_per_block,
        int(DTYPE_BYTES[config.model.dtype]),
        expands_weights=kept.expands_weights,
    )


def _size_pool(
    config: EngineConfig,
    layout: KVLayout,
    device: Device,
    kept: KeptWeights,
    workspace: RunnerBytes,
    free_bytes: int,
    reasons: list[str],
    head_block_bytes: int = 0,
) -> CacheConfig:
    """Set the number of blocks to what fits into the memory that weights and runner leave; `head_block_bytes`: what a
    head that predicts further tokens stores in addition to each block."""
    cache, weights, max_rows = config.cache, kept.parts.total, config.scheduler.num_rows
    fraction = cache.memory_fraction
    assert config.model.max_context is not None and fraction is not None
    if workspace.total and (cache.num_blocks is None or layout.is_recurrent):
        reasons.append(
            f"memory: weights {weights / 2**30:.2f} GiB, rows {workspace.rows / 2**30:.2f}, largest step "
            f"{workspace.step / 2**30:.2f}, graphs {workspace.graphs / 2**30:.2f}"
        )
    free_bytes = max(0, free_bytes - weights - workspace.total - device.start_bytes)
    block_bytes = layout.block_bytes(cache.tokens_per_block) + head_block_bytes
    if cache.num_blocks is None:
        num_blocks = num_blocks_that_fit(
            layout,
            free_bytes=free_bytes,
            memory_fraction=fraction,
            block_size=cache.tokens_per_block,
            block_bytes=block_bytes,
            max_context=config.model.max_context,
            max_rows=max_rows,
            max_chunk=config.scheduler.num_tokens,
        )
        cache = replace(cache, num_blocks=num_blocks)
        tokens = num_blocks * cache.tokens_per_block // len(layout.paged)
        gib = num_blocks * block_bytes / 2**30
        reasons.append(f"KV cache of {cache.kv_dtype}: {num_blocks:,} blocks, {gib:.2f} GiB, about {tokens:,} tokens")
    return _size_states(cache, layout, int(free_bytes * fraction), max_rows, reasons)


def _size_states(
    cache: CacheConfig, layout: KVLayout, cache_bytes: int, max_rows: int, reasons: list[str]
) -> CacheConfig:
    """Set the number of recurrent states to what fits into the memory that the blocks leave."""
    if not layout.is_recurrent:
        if cache.num_states is not None:
            problem = "num_states needs a model with recurrent layers, and this model has none"
            raise InvalidConfig(problem, param="num_states")
        return cache
    assert cache.num_blocks is not None
    num_states = cache.num_states or num_states_that_fit(
        layout,
        free_bytes=cache_bytes - cache.num_blocks * layout.block_bytes(cache.tokens_per_block),
        block_size=cache.tokens_per_block,
        num_blocks=cache.num_blocks,
        max_rows=max_rows,
    )
    gib = recurrent_bytes(layout, num_states, cache.tokens_per_block, max_rows) / 2**30
    reasons.append(f"recurrent layers: {num_states:,} states, {gib:.2f} GiB including the tokens between two states")
    return replace(cache, num_states=num_states)


def _within_pool(
    model: ModelConfig, cache: CacheConfig, layout: KVLayout, max_chunk: int, reasons: list[str]
) -> ModelConfig:
    """Limit the context to what the pool can hold of a single sequence: a longer one could never finish."""
    assert model.max_context is not None and cache.num_blocks is not None
    longest = longest_context(layout, cache, model.max_context, max_chunk)
    if not longest:
        least = 1 + len(layout.paged)
        raise InvalidConfig(
            f"num_blocks must be at least {least} for this model, got {cache.num_blocks}", param="num_blocks"
        )
    if longest < model.max_context:
        reasons.append(f"context limited to {longest:,} tokens by the size of the KV cache")
    return replace(model, max_context=longest)


def longest_context(layout: KVLayout, cache: CacheConfig, limit: int, max_chunk: int) -> int:
    """Return the longest context whose blocks fit into the pool (one block of the pool is the null block), in steps of
    up to `max_chunk` tokens."""
    assert cache.num_blocks is not None
    whole_blocks = range(1, -(-limit // cache.tokens_per_block) + 1)
    fitting = bisect_right(
        whole_blocks,
        cache.num_blocks - 1,
        key=lambda n: blocks_for_context(
            layout, n * cache.tokens_per_block, cache.tokens_per_block, min(limit, max_chunk)
        ),
    )
    return min(limit, fitting * cache.tokens_per_block)


def resolve_speculation(asked: str, *, overlaps: str | None) -> tuple[str, str]:
    """Return the speculation to use and the reason; `overlaps`: where steps overlap ("on a GPU"), or None."""
    if asked not in ("off", "auto", "ngram", MTP) and not asked.startswith(DRAFT_PREFIX):
        raise InvalidConfig(f"speculate must be {SPECULATIONS}, not {asked!r}", param="speculate")
    if asked == DRAFT_PREFIX:
        raise InvalidConfig("draft: needs a model", param="speculate", hint="--speculate draft:MODEL")
    if overlaps and asked not in ("off", "auto"):
        raise InvalidConfig(
            f"speculate {asked} can't be used: {overlaps} steps overlap, so draft tokens can't be verified in time",
            param="speculate",
            hint="leave it at auto, which is off there",
        )
    if overlaps and asked == "auto":
        return "off", f"speculation off: {overlaps} the next step starts before the tokens of this one are known"
    reasons = {
        "off": "speculation off",
        "auto": "speculation: draft tokens from earlier text, as many as pay off",
        "ngram": "speculation: all likely draft tokens from earlier text",
        MTP: "speculation: the model's own head that predicts further tokens (MTP) proposes draft tokens",
    }
    return asked, reasons.get(asked, f"speculation: {asked.removeprefix(DRAFT_PREFIX)} proposes draft tokens")
