"""Measures the thresholds of a `Tuning` row on the present GPU, for `tokenmill tune`.

Every threshold decides between kernels, or how a matrix is split. For each of a few candidate values the affected
products are timed, and the value with the smallest geometric mean is kept, if it gains at least MIN_GAIN over the
current one. Thresholds are measured one after another, with the results of earlier ones.

A measurement is a CUDA graph of several runs, each with another copy of the weights, so that they are read from memory
and not from the L2 cache. Some thresholds are not measured, and a row lists those that it kept: `fp8_split_max_rows`
affects precision; `attention_fused_min_splits` and `moe_gemv_programs` belong to kernels that fuse several regions; and
no measurement here has a matrix of table codes, as `table_hopper_max_rows` would need.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import geometric_mean, median
from typing import Any

import msgspec
import torch

from tokenmill.ops.batch import LayerCache, Mode
from tokenmill.ops.interface import AttentionArgs, ExpertsWeight, LinearWeight
from tokenmill.ops.triton.attention.plan import AttentionPlan
from tokenmill.ops.triton.attention.step import attention
from tokenmill.ops.triton.gemm.linear import add_linear, can_add, gated_linear, linear
from tokenmill.ops.triton.launch.capabilities import Capabilities, Tuning, assume_capabilities, capabilities_of
from tokenmill.ops.triton.moe.grouped_gemm import experts
from tokenmill.ops.triton.quant.quantized import to_fp8, to_int4, to_int8

MIN_GAIN = 0.02
COPIED_BYTES = 256 << 20  # total of all copies of the weights: several times the L2 cache
NUM_RUNS, NUM_REPLAYS = 6, 7
SHAPES = ((6144, 4096), (4096, 4096), (4096, 14336), (3072, 2048), (2048, 8192))  # matrices of 8B and 1B models
PACKERS: dict[str, Callable[[torch.Tensor], Any]] = {"fp8": to_fp8, "int4": to_int4, "int8": to_int8}

Run = Callable[[int], object]
"""Runs with the copy of the weights of this number"""


class MeasurementInputs:
    """Inputs and weights of measurements, created when they are first needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._weights: dict[tuple[str, int, int], list[LinearWeight]] = {}

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16) * 0.02

    def weights(self, form: str, n: int, k: int) -> list[LinearWeight]:
        """Return copies of a matrix [n, k] in a form: bf16, fp8, int4 or int8."""
        found = self._weights.get((form, n, k))
        if found is None:
            matrix = self._random(n, k)
            pack = PACKERS.get(form, torch.clone)
            packed = [pack(matrix) for _ in range(max(2, COPIED_BYTES // (2 * n * k)))]
            found = self._weights[(form, n, k)] = [LinearWeight(n, k, one) for one in packed]
        return found

    def product(self, form: str, shape: tuple[int, int], m: int, mode: Mode = "eager") -> Run:
        weights, x = self.weights(form, *shape), self._random(m, shape[1])
        return lambda number: linear(x, weights[number % len(weights)], mode)

    def gated(self, shape: tuple[int, int], m: int) -> Run:
        weights, x = self.weights("bf16", *shape), self._random(m, shape[1])
        return lambda number: gated_linear(x, weights[number % len(weights)], "silu")

    def added(self, shape: tuple[int, int], m: int) -> Run:
        weights, x, residual = self.weights("bf16", *shape), self._random(m, shape[1]), self._random(m, shape[0])

        def run(number: int) -> object:
            weight = weights[number % len(weights)]
            if can_add(weight, m, "eager"):
                return add_linear(x, weight, residual)
            return residual + linear(x, weight)

        return run

    @cached_property
    def _experts(self) -> ExpertsWeight:
        """Return 64 experts of 1,536 and 2,048; a token uses few of them, so one copy is enough."""
        return ExpertsWeight(64, (self._random(64, 1536, 2048), self._random(64, 2048, 768)))

    @cached_property
    def _packed_experts(self) -> ExpertsWeight:
        made = (to_int4(matrices.flatten(0, 1)) for matrices in self._experts.packed)
        return ExpertsWeight(64, tuple(replace(one, scales=one.scales.half(), row_scales=None) for one in made))

    def experts(self, num_tokens: int, *, is_packed: bool = False) -> Run:
        packed = self._packed_experts if is_packed else self._experts
        x, ids = self._random(num_tokens, 2048), torch.rand(NUM_RUNS, num_tokens, 64, device=self.device).argsort(2)
        weights = torch.full((num_tokens, 8), 0.125, device=self.device)
        chosen = [one[:, :8].contiguous() for one in ids]
        return lambda number: experts(x, weights, chosen[number % NUM_RUNS], packed, "silu")

    def attention(self, num_rows: int, context: int, num_queries: int = 1) -> Run:
        """Return a run of attention with 8 KV heads of 128 for 32 heads, over blocks of 16."""
        width = -(-context // 16)
        shape = (1 + num_rows * width, 8, 16, 128)
        caches = [LayerCache(self._random(*shape), self._random(*shape)) for _ in range(2)]
        tables = torch.arange(1, 1 + num_rows * width, device=self.device, dtype=torch.int32).view(num_rows, width)
        starts = torch.arange(num_rows + 1, device=self.device, dtype=torch.int32) * num_queries
        contexts = torch.full((num_rows,), context, device=self.device, dtype=torch.int32)
        queries = self._random(num_rows * num_queries, 32, 128)

        def run(number: int) -> object:
            is_dense = 1 < num_queries == context >= capabilities_of(self.device).tuning.attention_dense_min_tokens
            prompts = (num_queries,) * num_rows if is_dense else ()
            single = num_rows if num_queries == 1 else 0
            plan = AttentionPlan(tables, starts, contexts, single, prompts, num_queries, context, context)
            return attention(queries, caches[number % 2], plan, AttentionArgs(128**-0.5))

        return run


@dataclass(frozen=True)
class Tunable:
    """A threshold of a row, its candidate values, and the runs that are timed."""

    field: str
    candidates: tuple[int, ...]
    runs: tuple[Callable[[], Run], ...]
    is_hopper_only: bool = False


def tunables(bench: MeasurementInputs, multiprocessors: int) -> Iterator[Tunable]:
    def products(form: str, rows: tuple[int, ...], mode: Mode = "eager") -> tuple[Callable[[], Run], ...]:
        return tuple(partial(bench.product, form, shape, m, mode) for shape in SHAPES for m in rows)

    def times(*factors: float) -> tuple[int, ...]:
        return tuple(round(factor * multiprocessors) for factor in factors)

    yield Tunable("gemm_splitk_programs", times(0.75, 1.0, 1.45, 2.0, 3.0), products("bf16", (4, 16, 32)))
    yield Tunable("gemm_splitk_max_rows", (8, 16, 32, 64), products("bf16", (12, 24, 48, 64)))
    yield Tunable("gemm_hopper_min_chunks", (24, 48, 96), products("bf16", (64, 128), "captured"), True)
    yield Tunable("gemm_hopper_max_rows", (64, 128, 256), products("bf16", (96, 160, 256), "captured"), True)
    gates = tuple(partial(bench.gated, shape, m) for shape in ((28672, 4096), (16384, 2048)) for m in (512, 768, 1536))
    yield Tunable("gemm_gated_min_rows", (256, 512, 768, 1024, 2048), gates, True)
    sums = tuple(partial(bench.added, shape, m) for shape in SHAPES[1:3] for m in (128, 256, 512, 1024))
    yield Tunable("gemm_add_min_rows", (128, 256, 512, 1024), sums)
    yield Tunable("fp8_split_programs", times(0.75, 1.0, 1.45, 2.0, 3.0), products("fp8", (4, 16, 32)))
    yield Tunable("int4_gemv_programs", times(1.0, 2.0, 2.9, 4.0), products("int4", (1,)))
    yield Tunable("int4_splitk_programs", times(1.0, 1.9, 3.0, 4.0), products("int4", (4, 16, 32)))
    yield Tunable("int8_splitk_programs", times(1.0, 1.9, 3.9, 6.0), products("int8", (1, 8, 32)))
    yield Tunable("int4_splitk_max_rows", (32, 64, 128, 256), products("int4", (48, 96, 160)))
    yield Tunable("int8_splitk_max_rows", (32, 64, 128), products("int8", (48, 96)))
    yield Tunable("int_hopper_max_rows", (256, 512, 1024), products("int4", (384, 768)), True)
    few = tuple(partial(bench.experts, number) for number in (1, 2, 4, 8))
    yield Tunable("moe_gemv_max_tokens", (1, 2, 4, 8), few)
    many = tuple(partial(bench.experts, number, is_packed=True) for number in (512, 1024, 2048))
    yield Tunable("moe_expand_min_pairs", (64, 128, 256), many)
    decodes = tuple(partial(bench.attention, rows, context) for rows in (1, 8, 32) for context in (512, 4096))
    yield Tunable("attention_decode_programs", times(1.0, 2.0, 3.9, 8.0), decodes)
    prompts = tuple(partial(bench.attention, 1, length, length) for length in (512, 1024, 2048))
    yield Tunable("attention_dense_min_tokens", (512, 1024, 2048), prompts)


@torch.inference_mode()
def milliseconds(run: Run) -> float:
    """Return the time of one run, the median over replays of a graph of NUM_RUNS runs."""
    for number in range(NUM_RUNS):
        run(number)  # compiles its kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run(number) for number in range(NUM_RUNS)]
    times = []
    for _ in range(NUM_REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / NUM_RUNS)
    del kept
    return float(median(times))


def measure(device: torch.device, note: Callable[[str], None]) -> Tuning:
    """Measure the row of this GPU; `note` receives a line per threshold."""
    before = capabilities_of(device)
    properties = torch.cuda.get_device_properties(device)
    multiprocessors = properties.multi_processor_count
    current = msgspec.structs.replace(
        before.tuning,
        name=properties.name,
        compute_capability=before.compute_capability,
        multiprocessors=multiprocessors,
    )
    bench, measured = MeasurementInputs(device), []
    for tunable in tunables(bench, multiprocessors):
        if tunable.is_hopper_only and not before.has_gluon:
            continue
        current = _settle(tunable, current, before, note)
        measured.append(tunable.field)
    kept = [field for field in Tuning.__struct_fields__[5:] if field not in measured]
    return msgspec.structs.replace(
        current,
        source=f"measured on {time.strftime('%Y-%m-%d')} with torch {torch.__version__}",
        note=f"not measured, as {before.tuning.name} has them: {', '.join(kept)}",
    )


def _settle(tunable: Tunable, current: Tuning, gpu: Capabilities, note: Callable[[str], None]) -> Tuning:
    """Return the row with the fastest candidate."""
    runs = [make() for make in tunable.runs]
    old = getattr(current, tunable.field)
    means: dict[int, float] = {}
    for value in dict.fromkeys((old, *tunable.candidates)):
        tried = replace(gpu, tuning=msgspec.structs.replace(current, **{tunable.field: value}))
        with assume_capabilities(tried):
            means[value] = geometric_mean([milliseconds(run) for run in runs])
    best = min(means, key=lambda value: means[value])
    if means[best] > (1 - MIN_GAIN) * means[old]:
        best = old
    shown = ", ".join(f"{value}: {1000 * means[value]:.1f} µs" for value in sorted(means))
    note(f"{tunable.field} = {best}  ({shown})")
    return msgspec.structs.replace(current, **{tunable.field: best})


def format_row(row: Tuning) -> str:
    """Format a row for `tuning.toml`."""
    lines = []
    for field in Tuning.__struct_fields__:
        value = getattr(row, field)
        if value != "":
            shown = list(value) if isinstance(value, tuple) else f'"{value}"' if isinstance(value, str) else value
            lines.append(f"{field} = {shown}")
    return "[[gpu]]\n" + "\n".join(lines) + "\n"
