"""What a model takes on each device: weights, KV pool, activations, and what the runtime itself costs.

The KV pool is sized by the functions the engine allocates with (`runner/memory.py` over `kv/layout.py`), so the
estimate is the allocation. A split over devices cuts it like this:

    tensor split t    every matrix and the KV heads in t parts (KV heads can't be cut further than one a device)
    pipeline split p  the layers in p runs; the largest run is what must fit
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tokenmill.arch.cost import WeightParts, kv_bytes, kv_bytes_per_token
from tokenmill.arch.outline import Model, ModelOutline, outline_of
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.planner.device import PlanDevice
from tokenmill.runner.memory import RunnerLimits, blocks_for_context, num_blocks_that_fit

MIB = 1 << 20
GPU_CONTEXT_BYTES = 500 * MIB  # what the driver takes of a GPU before anything else
CPU_RUNTIME_BYTES = 272 * MIB  # interpreter, torch, tokenizer


@dataclass(frozen=True)
class Split:
    tensor: int = 1
    pipeline: int = 1

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline

    def layers(self, spec: Model) -> float:
        """Share of the layers that the fullest stage holds."""
        return ceil(spec.num_layers / self.pipeline) / spec.num_layers

    def kv_share(self, spec: Model) -> float:
        heads = max(layer.num_kv_heads for layer in outline_of(spec).layers)
        return ceil(heads / self.tensor) / heads * self.layers(spec)

    def check(self, spec: Model) -> None:
        heads = max(layer.num_heads for layer in outline_of(spec).layers)
        if self.tensor < 1 or heads % self.tensor:
            raise InvalidConfig(f"{heads} heads can't be split over {self.tensor} devices", param="tp")
        if not 1 <= self.pipeline <= spec.num_layers:
            raise InvalidConfig(f"{spec.num_layers} layers can't be split into {self.pipeline} stages", param="pp")


@dataclass(frozen=True)
class Limits:
    """What the engine is told: see the config fields of the same names."""

    context: int
    max_running: int = 256
    token_budget: int = 2048
    block_size: int = 16
    memory_fraction: float | None = None
    num_blocks: int | None = None  # of the pool; None: as many as the share of memory holds
    expands_weights: bool = False  # matrices that a GPU expands for large steps
    value_bytes: int = 2  # of an activation on a GPU


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the fullest device."""

    weights: int
    activations: int
    runtime: int
    graphs: int
    kv_pool: int
    kv_per_request: int  # at the planned context, on one device
    num_blocks: int
    available: int
    max_concurrency: int  # requests of full context that the pool holds
    mapped: int = 0  # pages of the model's file: counted as resident, given back when memory is short

    @property
    def resident(self) -> int:
        """What the system shows for the process once the pool is in use."""
        return self.total + self.mapped

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.runtime + self.graphs + self.kv_pool

    @property
    def fits(self) -> bool:
        """A pool whose size was given may be larger than what is there."""
        return self.max_concurrency >= 1 and self.total <= self.available


def plan_memory(
    spec: Model,
    parts: WeightParts,
    kv_dtype: str,
    device: PlanDevice,
    split: Split,
    limits: Limits,
    *,
    file_bytes: int = 0,
) -> MemoryPlan:
    """`file_bytes`: of a file that stays mapped while its packed copy is used (a GGUF file on a CPU)."""
    weights = device_weight_bytes(spec, parts, split)
    activations, graphs = step_bytes(spec, limits, device, split)
    runtime = CPU_RUNTIME_BYTES if device.is_cpu else GPU_CONTEXT_BYTES + device.runs_on.start_bytes
    free = device.available_bytes - weights - activations - runtime - graphs
    blocks, block_bytes, per_request = _pool(spec, kv_dtype, device, split, limits, free)
    held = 0 if blocks < 2 else (blocks - 1) // per_request
    return MemoryPlan(
        weights, activations, runtime, graphs, blocks * block_bytes, per_request * block_bytes, blocks,
        device.available_bytes, held, file_bytes if device.is_cpu else 0,
    )  # fmt: skip


def device_weight_bytes(spec: Model, parts: WeightParts, split: Split) -> int:
    """On the fullest stage: its share of the layers, and the embedding of the first one (or the head of the last)."""
    return int((parts.embedding + (parts.experts + parts.rest) * split.layers(spec)) / split.tensor)


def step_bytes(spec: Model, limits: Limits, device: PlanDevice, split: Split) -> tuple[int, int]:
    """(what the largest step needs, what captured steps keep)"""
    if device.is_cpu or isinstance(spec, ModelOutline):
        return outline_step_bytes(spec, limits, split, value_bytes=4 if device.is_cpu else limits.value_bytes), 0
    bounds = RunnerLimits(
        limits.max_running,
        limits.token_budget,
        limits.context,
        limits.block_size,
        limits.value_bytes,
        expands_weights=limits.expands_weights,
    )
    found = device.runs_on.workspace_bytes(spec, bounds, 1 / split.tensor)
    return found.rows + found.step, found.graphs


def outline_step_bytes(spec: Model, limits: Limits, split: Split, value_bytes: int) -> int:
    """The widest moment of the largest step: residual, its norm, and the projections of one layer; then the logits."""
    widest = max(layer.width for layer in outline_of(spec).layers) / split.tensor
    step = limits.token_budget * (2 * spec.hidden_size + widest) * value_bytes
    logits = min(limits.max_running, limits.token_budget) * spec.vocab_size / split.tensor * 4
    return int(step + logits)


def _pool(
    spec: Model, kv_dtype: str, device: PlanDevice, split: Split, limits: Limits, free: int
) -> tuple[int, int, int]:
    """(blocks, bytes of one on a device, blocks of one request)"""
    if isinstance(spec, ModelOutline):
        return _outline_pool(spec, kv_dtype, device, split, limits, free)
    layout = KVLayout.from_spec(spec, CacheDtypes(kv_dtype, _compute_dtype(device, limits)))
    block_bytes = ceil(layout.block_bytes(limits.block_size) * split.kv_share(spec))
    per_request = blocks_for_context(layout, limits.context, limits.block_size, limits.token_budget)
    if limits.num_blocks is not None:
        return limits.num_blocks, block_bytes, per_request
    fraction = limits.memory_fraction or device.runs_on.memory_fraction
    try:
        blocks = num_blocks_that_fit(
            layout,
            free_bytes=max(0, free),
            memory_fraction=fraction,
            block_size=limits.block_size,
            block_bytes=block_bytes,
            max_context=limits.context,
            max_rows=limits.max_running,
            max_chunk=limits.token_budget,
        )
    except InvalidConfig:
        blocks = 0
    return blocks, block_bytes, per_request


def _compute_dtype(device: PlanDevice, limits: Limits) -> str:
    """A type as wide as activations are."""
    return "float32" if device.is_cpu or limits.value_bytes == 4 else "bfloat16"


def _outline_pool(
    outline: ModelOutline, kv_dtype: str, device: PlanDevice, split: Split, limits: Limits, free: int
) -> tuple[int, int, int]:
    """Size the cache of a model that the engine has no layout for: a block holds some tokens of all layers, and a
    request takes as many blocks as its bytes need."""
    share = split.kv_share(outline)
    block_bytes = max(1, ceil(kv_bytes_per_token(outline, kv_dtype) * limits.block_size * share))  # 1: states only
    per_request = max(1, ceil(kv_bytes(outline, kv_dtype, limits.context) * share / block_bytes))
    affordable = int(max(0, free) * (limits.memory_fraction or device.runs_on.memory_fraction)) // block_bytes
    useful = limits.max_running * per_request + 1
    return min(affordable, useful) if limits.num_blocks is None else limits.num_blocks, block_bytes, per_request


# ── rules of thumb, for comparison ─────────────────────────────────────────────────────────────────────


def rule_of_thumb_bytes(num_parameters: float, bits: float, overhead: float = 0.2) -> float:
    """Weights plus a fifth: the estimate that forums use."""
    return num_parameters * bits / 8 * (1 + overhead)
