"""The plan of a server about to start: what its settings take on this machine, and whether they can hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tokenmill.arch.spec import ModelSpec
from tokenmill.config import CacheConfig, EngineConfig, SchedulerConfig
from tokenmill.config.engine import MAX_AUTO_CONTEXT
from tokenmill.engine.adapter_room import resolve_adapters
from tokenmill.engine.backends import Device
from tokenmill.engine.mtp_room import MTP
from tokenmill.hardware.torch_build import torch_computes_on_gpus
from tokenmill.planner.device import PlanDevice, this_machine, unmeasured_machine
from tokenmill.planner.memory import MemoryPlan
from tokenmill.planner.model import PlannedModel, model_at
from tokenmill.planner.plan import Plan, Question, make_plan, place
from tokenmill.planner.roofline import UNQUANTISED
from tokenmill.report.units import counted, duration

TYPICAL_INPUT, TYPICAL_OUTPUT = 512, 256
LARGEST_SHARE = 0.9  # of the memory that weights leave, for the KV pool of one of several models


def serving_plan(config: EngineConfig, path: Path, name: str, device: PlanDevice | None = None) -> Plan:
    """Plan a model as a server with these settings would run it. `device`: this machine, if it was measured already."""
    model = model_at(path, name)
    device = device or this_machine(use_gpu=_may_use_gpu(config), threads=config.ops.threads)
    return make_plan(model, device, _question(config, model, device))


def serving_memory(
    config: EngineConfig, path: Path, name: str, *, available: int | None = None, num_models: int = 1
) -> tuple[str, MemoryPlan]:
    """Plan the memory of one of several models of a server; return its device too.

    `available`: bytes that this model may count on; by default all that the device has. Its KV pool takes a
    `num_models`th of the usual share of what the weights leave. Where that is too little for one request of full
    length, it takes the usual share, then nine tenths.
    """
    model = model_at(path, name)
    device = unmeasured_machine(use_gpu=_may_use_gpu(config))
    if available is not None:
        device = replace(device, available_bytes=available)
    question, usual = _question(config, model, device), device.runs_on.memory_fraction
    shares: tuple[float, ...] = (usual / num_models, usual, max(usual, LARGEST_SHARE))
    if config.cache.memory_fraction is not None or config.cache.num_blocks is not None:
        shares = (config.cache.memory_fraction or usual,)
    for share in shares:
        memory = place(model, device, replace(question, memory_fraction=share)).memory
        if memory.fits:
            break
    return device.runs_on.name, memory


def _may_use_gpu(config: EngineConfig) -> bool:
    """Return whether an engine would run on a GPU that is there: by its settings, and by how torch was built."""
    return config.ops.device == "cuda" or (config.ops.device == "auto" and torch_computes_on_gpus())


def _question(config: EngineConfig, model: PlannedModel, device: PlanDevice) -> Question:
    """Ask for what the settings say, under a typical load."""
    context = config.model.max_context or min(model.spec.max_context, MAX_AUTO_CONTEXT)
    rows, tokens = device.runs_on.limits(device.available_bytes)
    return Question(
        input_len=min(TYPICAL_INPUT, max(1, context // 2)),
        output_len=min(TYPICAL_OUTPUT, max(1, context // 4)),
        dtype=config.model.dtype,
        weight_dtype=_weight_dtype(config, model, device.runs_on),
        kv_dtype=config.cache.kv_dtype,
        max_context=context,
        max_running=config.scheduler.max_running or rows,
        token_budget=config.scheduler.token_budget or tokens,
        memory_fraction=config.cache.memory_fraction,
        block_size=config.cache.block_size,
        num_blocks=config.cache.num_blocks,
        num_states=config.cache.num_states,
        adapter_values=_adapter_values(config, model),
        has_mtp_head=config.scheduler.speculate == MTP,
    )


def _adapter_values(config: EngineConfig, model: PlannedModel) -> int:
    """Numbers in the slots that the engine will make for adapters"""
    if not isinstance(model.spec, ModelSpec):
        return 0
    room = resolve_adapters(config.model, model.spec, 1)
    return room.slots * room.slot_values


def _weight_dtype(config: EngineConfig, model: PlannedModel, device: Device) -> str:
    """Weights are quantised while they are loaded only where the file has not done so; where --deterministic asks for
    kernels of its own, a file's quantised weights are expanded."""
    wanted, dtype = config.model.quantization, config.model.dtype
    if wanted != "none" and model.stored_dtype in UNQUANTISED:
        return wanted
    if device.batch_notes is None or not config.ops.deterministic:
        return "auto"
    return dtype if dtype != "auto" else device.compute_dtype(model.spec, True)


def serving_lines(config: EngineConfig, path: Path, name: str) -> list[str]:
    """A few lines for the log of a start. That not all requests that may run fit at full length is normal with default
    limits, and a warning with limits that were set; a model that can't run at all is always a warning."""
    plan = serving_plan(config, path, name)
    memory = plan.memory
    lines = [
        f"plan: weights {memory.weights / 1e9:.2f} GB, KV pool {memory.kv_pool / 1e9:.2f} GB for "
        f"{counted(memory.max_concurrency, 'request')} of {plan.question.context:,} tokens, "
        f"{memory.total / 1e9:.2f} GB in all",
        f"plan: a prompt of {plan.question.input_len} tokens about {duration(plan.ttft_s)} to the first token, "
        f"then {duration(plan.tpot_s)} a token alone ({plan.device.name})",
    ]
    if memory.fits and not _has_chosen_limits(config):
        return lines
    return lines + [f"plan: warning: {warning}" for warning in plan.warnings()]


def _has_chosen_limits(config: EngineConfig) -> bool:
    default = SchedulerConfig()
    return (
        config.model.max_context is not None
        or config.scheduler.max_running != default.max_running
        or config.cache != CacheConfig()
    )
