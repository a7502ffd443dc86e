"""A plan: a model on a device under a load, with every figure in one flat record; and grids of plans.

FLOPs are reported as the literature counts them: the layers' matrix products with the full square of attention, the
head apart (`head_tflops`). Times are computed with the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.arch.cost import (
    WeightParts,
    decode_flops,
    kv_bytes,
    kv_bytes_per_token,
    num_active_parameters,
    num_parameters,
    prefill_flops,
)
from tokenmill.arch.outline import Model, outline_of
from tokenmill.arch.spec import ModelSpec
from tokenmill.arch.unproven import is_chosen
from tokenmill.config.engine import USUAL_BLOCK_SIZE
from tokenmill.engine.backends import BACKENDS, default_kv_dtype
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import KVLayout
from tokenmill.ops.compute_request import ONE_BYTE_DTYPES, ROUNDED_LATENTS, caches_latents
from tokenmill.planner.capacity import Load, Price, Slo, largest_load, price, readers_kept_up_with, steady_load
from tokenmill.planner.device import PlanDevice
from tokenmill.planner.memory import Limits, MemoryPlan, Split, plan_memory, rule_of_thumb_bytes
from tokenmill.planner.model import PLAIN_DTYPES, PlannedModel, require_known
from tokenmill.planner.roofline import UNQUANTISED, Roofline, Speeds, quick_flops
from tokenmill.report.units import counted

TERA = 1e12


@dataclass(frozen=True)
class Question:
    """What to plan for: the load, the precisions, the split and the limits."""

    input_len: int = 1024
    output_len: int = 1024
    batch: int = 1
    dtype: str = "auto"  # what a GPU computes in
    weight_dtype: str = "auto"
    kv_dtype: str = "auto"
    split: Split = field(default_factory=Split)
    max_context: int | None = None
    max_running: int = 256
    token_budget: int = 2048
    memory_fraction: float | None = None
    block_size: int | None = None  # None: the model's default
    num_blocks: int | None = None
    num_states: int | None = None
    adapter_values: int = 0  # in all slots for adapters
    has_mtp_head: bool = False  # the model's head that predicts further tokens is read too
    slo: Slo = field(default_factory=Slo)
    usd_per_hour: float | None = None
    speeds: Speeds | None = None  # measured; None: from the device's peaks

    @property
    def context(self) -> int:
        return self.max_context or self.input_len + self.output_len

    @property
    def limits(self) -> Limits:
        return Limits(
            self.context,
            self.max_running,
            self.token_budget,
            memory_fraction=self.memory_fraction,
            num_blocks=self.num_blocks,
            num_states=self.num_states,
            adapter_values=self.adapter_values,
            has_mtp_head=self.has_mtp_head,
        )


@dataclass(frozen=True)
class Plan:
    """A planned model on a device: memory, speeds and the largest load."""

    model: PlannedModel
    device: PlanDevice
    question: Question
    weight_dtype: str
    kv_dtype: str
    memory: MemoryPlan
    roofline: Roofline
    best: Load | None  # the largest load within memory and limits
    price: Price | None

    @property
    def block_size(self) -> int:
        return block_size_for(self.model.spec, self.question)

    @property
    def tpot_s(self) -> float:
        q = self.question
        return self.roofline.decode_s(q.batch, q.input_len + q.output_len // 2)

    @property
    def ttft_s(self) -> float:
        return self.roofline.prefill_s(self.question.input_len)

    def curve(self) -> list[Load]:
        """Return the loads from one request to as many as memory holds."""
        q, most = self.question, max(1, self.memory.max_concurrency)
        batches = sorted({1, *[b for b in (2**n for n in range(13)) if b <= most], most})
        return [steady_load(self.roofline, batch, q.input_len, q.output_len) for batch in batches]

    def warnings(self) -> list[str]:
        return list(_warnings(self))

    def why_not(self) -> str:
        """Why it does not fit."""
        return _why_not(self)

    def flat(self) -> dict[str, Any]:
        return {**_model_facts(self), **_memory_facts(self), **_speed_facts(self), **_price_facts(self)}


@dataclass(frozen=True)
class Placement:
    """A model in the memory of a device: the precisions, the weights, and all bytes."""

    weight_dtype: str
    kv_dtype: str
    parts: WeightParts
    memory: MemoryPlan


def place(model: PlannedModel, device: PlanDevice, question: Question) -> Placement:
    """Plan the memory alone, for which the speeds of a device need not be known."""
    question.split.check(model.spec)
    computed = None if device.is_cpu else _compute_dtype(model.spec, question, device)
    weight_dtype = model.dtype(question.weight_dtype, computed)
    parts = model.weights(question.weight_dtype, computed)
    kv_dtype = question.kv_dtype
    if kv_dtype == "auto":
        kv_dtype = default_kv_dtype(model.spec, device.backend, computed)
    require_known(kv_dtype, "kv_dtype")
    file_bytes = model.stored.total if model.stored else 0
    limits = replace(
        question.limits,
        block_size=block_size_for(model.spec, question),
        expands_weights=parts is model.kept and model.expands_weights,
        value_bytes=4 if computed == "float32" else 2,
    )
    memory = plan_memory(model.spec, parts, kv_dtype, device, question.split, limits, file_bytes=file_bytes)
    return Placement(weight_dtype, kv_dtype, parts, memory)


def block_size_for(model: Model, question: Question) -> int:
    """Return the tokens per KV block, by default as many as the engine would choose."""
    if question.block_size is not None:
        return question.block_size
    return KVLayout.from_spec(model).default_block_size if isinstance(model, ModelSpec) else USUAL_BLOCK_SIZE


def engine_split(split: Split, device: PlanDevice, weight_dtype: str) -> Split:
    """The split as this engine computes it: GPUs may add up products of matrices that are not quantised."""
    sums = is_chosen("gpu_sums") and not device.is_cpu and weight_dtype in UNQUANTISED
    return replace(split, has_sums=split.has_sums or sums)


def make_plan(model: PlannedModel, device: PlanDevice, question: Question) -> Plan:
    placed = place(model, device, question)
    weight_dtype, kv_dtype, parts, memory = placed.weight_dtype, placed.kv_dtype, placed.parts, placed.memory
    speeds = question.speeds or Speeds.of_device(device, weight_dtype)
    roofline = Roofline(model.spec, parts, kv_dtype, device, engine_split(question.split, device, weight_dtype), speeds)
    most = min(memory.max_concurrency, question.max_running)
    best = largest_load(roofline, question.slo, most, question.input_len, question.output_len) if most else None
    return Plan(
        model, device, question, weight_dtype, kv_dtype, memory, roofline, best, _price(roofline, question, best)
    )


def _compute_dtype(spec: Model, question: Question, device: PlanDevice) -> str:
    if question.dtype != "auto":
        return question.dtype
    asked = question.weight_dtype
    return asked if asked in PLAIN_DTYPES else device.runs_on.compute_dtype(spec, asked != "auto")


def _price(roofline: Roofline, question: Question, best: Load | None) -> Price | None:
    hourly, listed = question.usd_per_hour, roofline.device.peaks.price_usd_h
    if hourly is None and listed is not None:
        hourly = listed * question.split.num_devices
    if hourly is None or best is None:
        return None
    return price(
        hourly,
        prefill_s=roofline.prefill_s(question.input_len),
        input_len=question.input_len,
        decode_tok_s=roofline.decode_tok_s(best.concurrency, question.input_len + question.output_len // 2),
        output_len=question.output_len,
    )


def embedding_once_parameters(spec: Model) -> int:
    """Count parameters as many tables do: layer matrices and the embedding once, tied or not, no norms or biases."""
    layers = sum(layer.linear + layer.experts for layer in outline_of(spec).layers)
    return layers + spec.vocab_size * spec.hidden_size


def _model_facts(plan: Plan) -> dict[str, Any]:
    spec, q = plan.model.spec, plan.question
    active = num_active_parameters(spec)
    middle = q.input_len + q.output_len // 2
    head = 2 * spec.vocab_size * spec.hidden_size
    return {
        "model": plan.model.name,
        "family": spec.family,
        "params_total": num_parameters(spec),
        "params_active": active,
        "params_embedding_once": embedding_once_parameters(spec),
        "weight_dtype": plan.weight_dtype,
        "weight_bytes": plan.roofline.parts.total,
        "kv_dtype": plan.kv_dtype,
        "kv_bytes_per_token": kv_bytes_per_token(spec, plan.kv_dtype),
        "kv_bytes_per_request": kv_bytes(spec, plan.kv_dtype, q.context),
        "max_context": spec.max_context,
        "input_len": q.input_len,
        "output_len": q.output_len,
        "prefill_tflops": prefill_flops(spec, q.input_len, num_logits=0, causal=False) / TERA,
        "prefill_tflops_causal": prefill_flops(spec, q.input_len, num_logits=0) / TERA,
        "prefill_tflops_quick": quick_flops(active, q.input_len) / TERA,
        "decode_tflops_per_token": (decode_flops(spec, middle) - head) / TERA,
        "decode_tflops_per_token_quick": quick_flops(active, 1) / TERA,
        "head_tflops": head / TERA,
    }


def _memory_facts(plan: Plan) -> dict[str, Any]:
    memory, split = plan.memory, plan.question.split
    return {
        "device": plan.device.name,
        "device_source": plan.device.source,
        "num_devices": split.num_devices,
        "tensor_split": split.tensor,
        "pipeline_split": split.pipeline,
        "device_bytes": memory.available,
        "device_weight_bytes": memory.weights,
        "activation_bytes": memory.activations,
        "runtime_bytes": memory.runtime,
        "graph_bytes": memory.graphs,
        "kv_pool_bytes": memory.kv_pool,
        "mtp_head_bytes": memory.mtp_head,
        "kv_pool_blocks": memory.num_blocks,
        "total_bytes": memory.total,
        "resident_bytes": memory.resident,
        "rule_of_thumb_bytes": rule_of_thumb_bytes(
            num_parameters(plan.model.spec), 8 * plan.roofline.parts.total / num_parameters(plan.model.spec)
        ),
        "fits": memory.fits,
        "max_concurrency_memory": memory.max_concurrency,
    }


def _speed_facts(plan: Plan) -> dict[str, Any]:
    best, q = plan.best, plan.question
    return {
        "mfu": plan.device.mfu,
        "mbu": plan.device.mbu,
        "is_calibrated": q.speeds is not None,
        "batch": q.batch,
        "ttft_s": plan.ttft_s,
        "tpot_s": plan.tpot_s,
        "e2e_s": plan.ttft_s + (q.output_len - 1) * plan.tpot_s,
        "decode_tok_s": plan.roofline.decode_tok_s(q.batch, q.input_len + q.output_len // 2),
        "slo_ttft_s": q.slo.ttft_s,
        "slo_tpot_s": q.slo.tpot_s,
        "max_concurrency": best.concurrency if best else 0,
        "max_requests_s": best.requests_s if best else 0.0,
        "max_output_tok_s": best.output_tok_s if best else 0.0,
        "ttft_s_at_max": best.ttft_s if best else None,
        "tpot_s_at_max": best.tpot_s if best else None,
        "keeps_up_with": readers_kept_up_with(plan.tpot_s),
        "warnings": plan.warnings(),
    }


def _price_facts(plan: Plan) -> dict[str, Any]:
    p = plan.price
    return {
        "usd_per_hour": p.usd_per_hour if p else None,
        "usd_per_million_input": p.usd_per_million_input if p else None,
        "usd_per_million_output": p.usd_per_million_output if p else None,
        "usd_per_request": p.usd_per_request if p else None,
    }


def _warnings(plan: Plan) -> Iterator[str]:
    q, memory, spec = plan.question, plan.memory, plan.model.spec
    if q.context > spec.max_context:
        yield f"a context of {q.context:,} tokens is more than the model's {spec.max_context:,}"
    if _rounds_latents(spec, plan.kv_dtype):
        yield f"the engine refuses {ROUNDED_LATENTS}: serve this model without --kv-dtype {plan.kv_dtype}"
    if q.context < q.input_len + q.output_len:
        yield f"a request of {q.input_len + q.output_len:,} tokens is longer than the context of {q.context:,}"
    if not memory.fits:
        yield _why_not(plan)
    elif plan.best is None:
        yield "the limits on TTFT and TPOT can't be met, not even for one request"
    elif memory.max_concurrency < q.max_running:
        yield (
            f"memory holds {counted(memory.max_concurrency, 'request')} of {q.context:,} tokens, fewer than the "
            f"{q.max_running} that may run; more will wait or be preempted"
        )


def _why_not(plan: Plan) -> str:
    memory = plan.memory
    fixed = memory.total - memory.kv_pool
    if fixed >= memory.available:
        return f"does not fit: {fixed / 1e9:.1f} GB without a KV cache, {memory.available / 1e9:.1f} GB are there"
    if memory.total > memory.available:
        room, taken = memory.available - fixed, memory.kv_pool
        return f"does not fit: {memory.num_blocks:,} KV blocks take {taken / 1e9:.1f} GB, {room / 1e9:.1f} are left"
    return (
        f"does not fit: one request of {plan.question.context:,} tokens needs {memory.kv_per_request / 1e9:.2f} GB of "
        f"KV cache, the pool has {memory.kv_pool / 1e9:.2f} GB"
    )


# ── grids of plans ───────────────────────────────────────────────────────────────────────────────────────


PRECISIONS = (("auto", "auto"), ("auto", "int8"), ("fp8", "auto"), ("int8", "auto"), ("int8", "int8"), ("int4", "auto"),
              ("int4", "int8"))  # fmt: skip
SPLITS = (Split(), Split(2), Split(4), Split(8), Split(8, 2), Split(8, 4))


def grid(
    model: PlannedModel,
    device: PlanDevice,
    question: Question,
    precisions: Sequence[tuple[str, str]] = PRECISIONS,
    splits: Sequence[Split] = SPLITS,
) -> list[Plan]:
    """Plan every precision on every split that the model's heads and layers allow; a CPU is never split.

    What no backend of the device can do, and what does not fit, is left out, and so are several machines where one
    holds it; two ways to the same precisions are one plan.
    """
    found: dict[tuple[Split, str, str], Plan] = {}
    for weights, kv in precisions:
        if not _is_possible(model, device, weights, kv):
            continue
        for split in _allowed(model, device, splits):
            plan = make_plan(model, device, replace(question, split=split, weight_dtype=weights, kv_dtype=kv))
            if plan.memory.fits:
                found.setdefault((split, plan.weight_dtype, plan.kv_dtype), plan)
    plans = list(found.values())
    in_one_machine = [plan for plan in plans if plan.question.split.pipeline == 1]
    return in_one_machine or plans


def _is_possible(model: PlannedModel, device: PlanDevice, weights: str, kv: str) -> bool:
    """Return whether some backend of the device turns these weights into that precision while it loads them, and
    stores the model's KV cache in that type."""
    backends = [backend for backend in BACKENDS if device.runs_on in backend.devices]
    if weights != "auto" and model.stored_dtype not in UNQUANTISED:
        return False  # a file that is quantised already is taken as it is
    if _rounds_latents(model.spec, kv):
        return False
    return any(
        (weights == "auto" or weights in backend.quantizations) and (kv == "auto" or kv in backend.kv_dtypes)
        for backend in backends
    )


def _rounds_latents(model: Model, kv_dtype: str) -> bool:
    return isinstance(model, ModelSpec) and kv_dtype in ONE_BYTE_DTYPES and caches_latents(model)


def _allowed(model: PlannedModel, device: PlanDevice, splits: Sequence[Split]) -> Iterator[Split]:
    for split in splits if not device.is_cpu else (Split(),):
        try:
            split.check(model.spec)
        except InvalidConfig:
            continue
        yield split
