"""Memory of a model on each device: weights, KV pool, activations, and the runtime itself.

The KV pool is sized by the functions the engine allocates with (`runner/memory.py` over `kv/layout.py`), so the
estimate equals the allocation. A split over devices divides it:

    tensor split t    every matrix and the KV heads in t parts (at least one KV head per device)
    pipeline split p  the layers in p stages, parted as the engine does; the largest stage must fit
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tokenmill.arch.cost import WeightParts, kv_bytes, kv_bytes_per_token
from tokenmill.arch.outline import Model, ModelOutline, outline_of
from tokenmill.arch.spec import ModelSpec
from tokenmill.engine.mtp_room import mtp_block_bytes, mtp_bytes
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.parallel.cuts import cut_spec
from tokenmill.parallel.stages import head_cost, layer_costs, split_layers, stage_limits, stage_share
from tokenmill.planner.device import PlanDevice
from tokenmill.runner.memory import (
    CPU_INDEX_SCORES,
    RunnerLimits,
    blocks_for_context,
    index_bytes,
    num_blocks_that_fit,
    num_states_that_fit,
    recurrent_bytes,
)

MIB = 1 << 20
GPU_CONTEXT_BYTES = 500 * MIB  # taken by the driver before anything else
CPU_RUNTIME_BYTES = 272 * MIB  # interpreter, torch, tokenizer


@dataclass(frozen=True)
class Split:
    tensor: int = 1
    pipeline: int = 1
    has_sums: bool = False
    """Devices add up partial sums behind attention and MLP, as other engines do; else they gather what each has
    computed, twice as often, as ours does."""

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline

    def layers(self, spec: Model) -> float:
        """Return the share of the layers in the fullest stage."""
        return ceil(spec.num_layers / self.pipeline) / spec.num_layers

    def stages(self, spec: ModelSpec) -> list[range]:
        return split_layers(spec, self.pipeline)

    def slowest_stage(self, spec: Model) -> float:
        """Return the share of a token's work that the slowest stage does."""
        if isinstance(spec, ModelOutline):
            return self.layers(spec)
        costs, head = layer_costs(spec), head_cost(spec)
        slowest = max(sum(costs[number] for number in stage) + head * (stage.start == 0) for stage in self.stages(spec))
        return slowest / (sum(costs) + head)

    def kv_share(self, outline: ModelOutline) -> float:
        heads = max(layer.num_kv_heads for layer in outline.layers)
        return ceil(heads / self.tensor) / heads * self.layers(outline)

    def kv_layout(self, spec: ModelSpec, dtypes: CacheDtypes, block_size: int) -> KVLayout:
        """Return what the device with most of the KV cache keeps, as the engine lays it out."""
        whole = KVLayout.from_spec(cut_spec(spec, self.tensor, 0), dtypes)
        if self.pipeline == 1:
            return whole
        return max((whole.of_layers(stage) for stage in self.stages(spec)), key=lambda one: one.block_bytes(block_size))

    def check(self, spec: Model) -> None:
        if self.pipeline > 1 and isinstance(spec, ModelSpec) and (why := stage_limits(spec, self.pipeline)) is not None:
            raise InvalidConfig(why, param="pp")
        heads = max(layer.num_heads for layer in outline_of(spec).layers)
        if self.tensor < 1 or heads % self.tensor:
            raise InvalidConfig(f"{heads} heads can't be split over {self.tensor} devices", param="tp")
        if not 1 <= self.pipeline <= spec.num_layers:
            raise InvalidConfig(f"{spec.num_layers} layers can't be split into {self.pipeline} stages", param="pp")


@dataclass(frozen=True)
class Limits:
    """Limits of the engine: the config fields of the same names."""

    context: int
    max_running: int = 256
    token_budget: int = 2048
    block_size: int = 16
    memory_fraction: float | None = None
    num_blocks: int | None = None  # of the pool; None: as many as the share of memory holds
    num_states: int | None = None  # of recurrent layers, likewise
    expands_weights: bool = False  # matrices that a GPU expands for large steps
    value_bytes: int = 2  # of an activation on a GPU
    adapter_values: int = 0  # numbers in all slots for adapters
    has_mtp_head: bool = False  # a head that predicts further tokens, and its part of the KV cache


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
    num_states: int = 0  # of recurrent layers
    adapters: int = 0  # slots for them
    mtp_head: int = 0  # of a head that predicts further tokens; what it keeps of contexts is in the pool

    @property
    def resident(self) -> int:
        """Return the resident size of the process once the pool is in use."""
        return self.total + self.mapped

    @property
    def total(self) -> int:
        beside = self.adapters + self.mtp_head
        return self.weights + self.activations + self.runtime + self.graphs + self.kv_pool + beside

    @property
    def fits(self) -> bool:
        """Return whether everything fits; a pool with a given size may be larger than the memory."""
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
    """Plan the memory. `file_bytes`: size of a file that stays mapped beside its packed copy (a GGUF file on a CPU)."""
    weights = device_weight_bytes(spec, parts, split)
    activations, graphs = step_bytes(spec, limits, device, split)
    runtime = CPU_RUNTIME_BYTES if device.is_cpu else GPU_CONTEXT_BYTES + device.runs_on.start_bytes
    adapters = limits.adapter_values * (4 if device.is_cpu else limits.value_bytes)
    head = mtp_bytes(spec, parts, limits.max_running) // split.tensor if limits.has_mtp_head else 0
    free = device.available_bytes - weights - activations - runtime - graphs - adapters - head
    pool = _pool(spec, kv_dtype, device, split, limits, free)
    held = 0 if pool.num_blocks < 2 else (pool.num_blocks - 1) // pool.blocks_per_request
    if pool.state_bytes:
        held = min(held, (pool.num_states - 1) // 2)
    return MemoryPlan(
        weights, activations, runtime, graphs, pool.num_bytes, pool.bytes_per_request, pool.num_blocks,
        device.available_bytes, held, file_bytes if device.is_cpu else 0, pool.num_states, adapters, head,
    )  # fmt: skip


def device_weight_bytes(spec: Model, parts: WeightParts, split: Split) -> int:
    """Return the weights on the fullest stage: its layers, and of the first one embedding and head."""
    if isinstance(spec, ModelSpec):
        share = max(stage_share(spec, stage) for stage in split.stages(spec)) if split.pipeline > 1 else 1.0
        return int(parts.total * share / split.tensor)
    return int((parts.embedding + parts.tables + (parts.experts + parts.rest) * split.layers(spec)) / split.tensor)


def step_bytes(spec: Model, limits: Limits, device: PlanDevice, split: Split) -> tuple[int, int]:
    """Return (bytes of the largest step, bytes kept by captured graphs)."""
    if device.is_cpu or isinstance(spec, ModelOutline):
        step = outline_step_bytes(spec, limits, split, value_bytes=4 if device.is_cpu else limits.value_bytes)
        if isinstance(spec, ModelSpec):
            step += index_bytes(spec, limits.token_budget, limits.context, CPU_INDEX_SCORES)
        return step, 0
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
    """Return the peak bytes of the largest step: residual, its norm, the projections of one layer, and the logits."""
    widest = max(layer.width for layer in outline_of(spec).layers) / split.tensor
    step = limits.token_budget * (2 * spec.hidden_size + widest) * value_bytes
    logits = min(limits.max_running, limits.token_budget) * spec.vocab_size / split.tensor * 4
    return int(step + logits)


@dataclass(frozen=True)
class PoolPlan:
    """The cache on one device."""

    num_blocks: int
    block_bytes: int
    blocks_per_request: int
    num_states: int = 0
    state_bytes: int = 0  # of one, without its share of the cells
    recurrent_bytes: int = 0  # of all states and cells

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.recurrent_bytes

    @property
    def bytes_per_request(self) -> int:
        return self.blocks_per_request * self.block_bytes + 2 * self.state_bytes


def _pool(spec: Model, kv_dtype: str, device: PlanDevice, split: Split, limits: Limits, free: int) -> PoolPlan:
    if isinstance(spec, ModelOutline):
        return _outline_pool(spec, kv_dtype, device, split, limits, free)
    size = limits.block_size
    dtypes = CacheDtypes(kv_dtype, _compute_dtype(device, limits))
    layout = split.kv_layout(spec, dtypes, size)
    block_bytes = layout.block_bytes(size) + (mtp_block_bytes(spec, dtypes, size) if limits.has_mtp_head else 0)
    per_request = blocks_for_context(layout, limits.context, size, limits.token_budget)
    fraction = limits.memory_fraction or device.runs_on.memory_fraction
    try:
        blocks = limits.num_blocks or num_blocks_that_fit(
            layout,
            free_bytes=max(0, free),
            memory_fraction=fraction,
            block_size=size,
            block_bytes=block_bytes,
            max_context=limits.context,
            max_rows=limits.max_running,
            max_chunk=limits.token_budget,
        )
        states = limits.num_states or num_states_that_fit(
            layout,
            free_bytes=int(max(0, free) * fraction) - blocks * block_bytes,
            block_size=size,
            num_blocks=blocks,
            max_rows=limits.max_running,
        )
    except InvalidConfig:
        return PoolPlan(0, block_bytes, per_request)
    if not layout.is_recurrent:
        return PoolPlan(blocks, block_bytes, per_request)
    taken = recurrent_bytes(layout, states, size, limits.max_running)
    return PoolPlan(blocks, block_bytes, per_request, states, layout.state_bytes, taken)


def _compute_dtype(device: PlanDevice, limits: Limits) -> str:
    """Return a dtype as wide as the activations."""
    return "float32" if device.is_cpu or limits.value_bytes == 4 else "bfloat16"


def _outline_pool(
    outline: ModelOutline, kv_dtype: str, device: PlanDevice, split: Split, limits: Limits, free: int
) -> PoolPlan:
    """Size the cache of a model that the engine has no layout for: a block holds some tokens of all layers, and a
    request takes as many blocks as its bytes need."""
    share = split.kv_share(outline)
    block_bytes = max(1, ceil(kv_bytes_per_token(outline, kv_dtype) * limits.block_size * share))  # 1: states only
    per_request = max(1, ceil(kv_bytes(outline, kv_dtype, limits.context) * share / block_bytes))
    affordable = int(max(0, free) * (limits.memory_fraction or device.runs_on.memory_fraction)) // block_bytes
    useful = limits.max_running * per_request + 1
    return PoolPlan(limits.num_blocks or min(affordable, useful), block_bytes, per_request)


# ── rules of thumb, for comparison ─────────────────────────────────────────────────────────────────────


def rule_of_thumb_bytes(num_parameters: float, bits: float, overhead: float = 0.2) -> float:
    """Return the common estimate: weights plus a fifth."""
    return num_parameters * bits / 8 * (1 + overhead)
