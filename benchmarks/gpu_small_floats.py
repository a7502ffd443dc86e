"""Products with fp8 matrices of blocks, NVFP4 and MXFP4, codes of a table (nf4, IQ4) and integers in act order as a
file has them, beside the forms in which they were kept before (fp8, nf4, IQ4_XS and act order expanded to bfloat16,
other 4 bits as integers of 8 bits), and attention over entries that an indexer chooses, beside attention to all: first
whether they are right, then how long both take.

    python benchmarks/gpu_small_floats.py                          all of it, 200 s of an H200
    python benchmarks/gpu_small_floats.py tables --rows 1 8 32 --output small-floats.json

What is wrong is named and not timed. Times are of graphs that are replayed, over as many matrices as a layer stack
would have, so that none is found in the cache; `floor` is the time that reading the stored bytes takes at the speed of
a copy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_kernels import graph_ms

from tests.support.small_floats import raw_matrix
from tests.support.table_matrices import act_order, table_matrix
from tokenmill.arch.indexer import Indexer
from tokenmill.arch.packed_formats import INT8_GROUP, NV_GROUP, TABLE_SCALE_BYTES, PackedIntFormat
from tokenmill.ops.interface import ExpertsWeight, IndexInputs, LatentInputs, LinearWeight, Norm, Ops, Routing
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.ops.triton.attention.plan import AttentionPlan
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.quant.quantized import (
    OrderedMatrix,
    PackedIntMatrix,
    interleaved,
    packed_from_blocks,
)
from tokenmill.weights.dequantize import dequantize

COLD_BYTES = 256 << 20  # of different matrices that a graph multiplies by: several times the L2 cache
ROWS = (1, 4, 8, 16, 32, 33, 64, 128, 256, 512, 2048, 8192)
MATRICES = {"qkv of 8B": (6144, 4096), "gate_up of 8B": (28672, 4096), "down of 8B": (4096, 14336)}
TOKENS = (1, 4, 8, 32, 128, 512, 2048, 8192)
EXPERTS, ACTIVE, HIDDEN, INTER = 128, 8, 2048, 768  # Qwen3-30B-A3B


@dataclass(frozen=True)
class KernelTiming:
    kernels: str
    what: str
    rows: int
    error: float
    new_ms: float
    old_ms: float
    floor_ms: float

    def __str__(self) -> str:
        times = f"{self.new_ms:8.4f} {self.old_ms:8.4f} {self.floor_ms:8.4f}  {self.old_ms / self.new_ms:5.2f} x"
        return f"{self.kernels:13} {self.what:28} {self.rows:5}  {self.error:.4f} {times}"


def each_ms(works: Sequence[Callable[[], object]]) -> float:
    """Median time of one of `works`, which are captured into a graph one after the other"""

    def run_all() -> None:
        for work in works:
            work()

    return graph_ms(run_all, repeats=7) / len(works)


def copy_bandwidth() -> float:
    """Bytes read and written a millisecond by a kernel that copies (a copy inside a graph may take a slower engine)"""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / each_ms([lambda: torch.neg(source, out=target)])


def on_gpu(raw: RawTensor) -> RawTensor:
    return replace(raw, data=raw.data.cuda())


def dense(raw: RawTensor) -> torch.Tensor:
    return dequantize(raw, torch.bfloat16).cuda()  # packing asks for an empty one to learn where weights go


def packed_as_before(raw: RawTensor) -> torch.Tensor | PackedIntMatrix:
    """Expanded, or formats of 4 bits as integers of 8 bits; the matrices of experts one below the other"""
    if raw.quant in (None, "F8", "NF4", "FP4", "IQ4_XS"):
        return dense(raw)
    form = PackedIntFormat(8, INT8_GROUP if raw.quant in ("MXFP4", "IQ4_NL") else NV_GROUP, has_minima=False, span=32)
    return packed_from_blocks(raw.data.flatten(0, -2), str(raw.quant), form)


def linear_as_before(raw: RawTensor) -> LinearWeight:
    return LinearWeight(*raw.shape, packed_as_before(raw))


def experts_as_before(gate: RawTensor, up: RawTensor, down: RawTensor) -> ExpertsWeight:
    gates, ups, downs = map(packed_as_before, (gate, up, down))
    if isinstance(gates, torch.Tensor) and isinstance(ups, torch.Tensor):
        return ExpertsWeight(EXPERTS, (torch.cat((gates, ups), dim=1), downs))
    assert isinstance(gates, PackedIntMatrix) and isinstance(ups, PackedIntMatrix)
    return ExpertsWeight(EXPERTS, (interleaved(gates, ups, EXPERTS), downs))


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


def num_bytes(packed: Any) -> int:
    if isinstance(packed, torch.Tensor):
        return packed.nbytes
    if isinstance(packed, tuple):
        return sum(map(num_bytes, packed))
    if isinstance(packed, OrderedMatrix):
        return num_bytes(packed.matrix) + packed.order.nbytes
    return sum(value.nbytes for value in vars(packed).values() if isinstance(value, torch.Tensor))


def copies(packed: Any) -> list[Any]:
    """The same matrices at several places, enough of them that none stays in the cache"""
    count = max(1, COLD_BYTES // max(1, num_bytes(packed.packed)))
    return [packed, *(replace(packed, packed=_copied(packed.packed)) for _ in range(count - 1))]


def _copied(packed: Any) -> Any:
    if isinstance(packed, torch.Tensor):
        return packed.clone()
    if isinstance(packed, tuple):
        return tuple(map(_copied, packed))
    if isinstance(packed, OrderedMatrix):
        return replace(packed, matrix=_copied(packed.matrix))
    moved = {name: value.clone() for name, value in vars(packed).items() if isinstance(value, torch.Tensor)}
    return replace(packed, **moved)


def drawn_matrix(quant: str, shape: tuple[int, int]) -> RawTensor:
    if quant == "act order":
        order = torch.randperm(shape[1])
        return act_order(4, shape[0], order, is_symmetric=True, group=128)
    if quant in TABLE_SCALE_BYTES:
        return table_matrix(quant, shape, 1, 2 if quant in ("NF4", "FP4") else 1)
    return raw_matrix(quant, shape, seed=1)


def matrices(
    kernels: str, quant: str, limits: tuple[float, float], bandwidth: float, numbers: Sequence[int]
) -> Iterator[KernelTiming]:
    """`limits`: errors that are allowed of few rows and of many"""
    ops = build_ops()
    for name, shape in MATRICES.items():
        raw = on_gpu(drawn_matrix(quant, shape))
        exact = dequantize(raw)
        new, old = ops.pack_linear([raw], None, dense), linear_as_before(raw)
        assert type(new.packed) is not type(old.packed)
        all_new, all_old, floor = copies(new), copies(old), num_bytes(new.packed) / bandwidth
        for rows in numbers:
            x = torch.randn(rows, shape[1], device="cuda").bfloat16()
            error = relative_error(ops.linear(x, new, "captured"), x.float() @ exact.T)
            what = f"{quant} {name}"
            if not error < limits[rows > 32]:
                print(f"{kernels:13} {what:28} {rows:5}  WRONG: {error:.4f}", flush=True)
                continue
            times = (each_ms([_product(ops, x, one) for one in some]) for some in (all_new, all_old))
            yield KernelTiming(kernels, what, rows, error, *times, floor)


def _product(ops: Ops, x: torch.Tensor, weight: Any) -> Callable[[], object]:
    return lambda: ops.linear(x, weight, "captured")


def experts(kernels: str, quant: str, limits: tuple[float, float], bandwidth: float) -> Iterator[KernelTiming]:
    ops = build_ops()
    shapes = {"gate": (EXPERTS, INTER, HIDDEN), "up": (EXPERTS, INTER, HIDDEN), "down": (EXPERTS, HIDDEN, INTER)}
    gate, up, down = (
        on_gpu(raw_matrix(quant, shape, seed=number, name=f"layers.0.experts.{part}.weight"))
        for number, (part, shape) in enumerate(shapes.items())
    )
    new, old = ops.pack_experts(gate, up, down, dense), experts_as_before(gate, up, down)
    exact = REFERENCE_OPS.pack_experts(gate, up, down, dequantize)
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        weights, ids = REFERENCE_OPS.route(torch.randn(tokens, EXPERTS, device="cuda"), Routing(ACTIVE))
        few = min(tokens, 64)
        wanted = REFERENCE_OPS.experts(x[:few].float(), weights[:few], ids[:few], exact, "silu")
        error = relative_error(ops.experts(x, weights, ids, new, "silu")[:few], wanted)
        what = f"{quant} experts of 30B-A3B"
        if not error < limits[tokens > 32]:
            print(f"{kernels:13} {what:28} {tokens:5}  WRONG: {error:.4f}", flush=True)
            continue
        used = len(ids.unique()) / EXPERTS
        times = (each_ms([_routed(ops, x, weights, ids, one) for one in copies(some)]) for some in (new, old))
        yield KernelTiming(kernels, what, tokens, error, *times, num_bytes(new.packed) * used / bandwidth)


def _routed(ops: Ops, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Any) -> Callable[[], object]:
    return lambda: ops.experts(x, weights, ids, packed, "silu")


def sparse_attention(bandwidth: float) -> Iterator[KernelTiming]:
    """One layer of DeepSeek V3.2 in decoding steps: choosing entries and attending to them, beside attending to all"""
    ops, indexer, heads, rank, rope = build_ops(), Indexer(64, 128, 2048), 128, 512, 64

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    absorb, expand = drawn(heads, rank, 128) * 0.1, drawn(heads, 128, rank) * 0.1
    norm = Norm(torch.ones(rank, device="cuda"), 1e-6)
    key_norm = Norm(torch.ones(128, device="cuda"), 1e-6, torch.zeros(128, device="cuda"), is_centred=True)
    for rows, context in ((1, 2000), (1, 16384), (1, 131072), (32, 2000), (32, 16384), (128, 8192)):
        each = -(-context // 16)
        tables = (torch.randperm(rows * each, device="cuda") + 1).int().view(rows, each)
        contexts = torch.full((rows,), context, device="cuda", dtype=torch.int32)
        starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
        plan = AttentionPlan(tables, starts, contexts, rows, (), 1, context, context)
        slots = tables[:, -1].long() * 16 + (context - 1) % 16
        angles = torch.ones(rows, rope // 2, device="cuda"), torch.zeros(rows, rope // 2, device="cuda")
        blocks = rows * each + 1
        index = IndexInputs(
            drawn(rows, indexer.q_size), drawn(rows, 128), drawn(rows, 64), drawn(blocks, 16, 128), slots, key_norm,
            angles, plan, indexer,
        )  # fmt: skip
        inputs = LatentInputs(
            drawn(rows, heads * (128 + rope)), drawn(rows, rank + rope), drawn(blocks, 16, rank + rope), slots, norm,
            angles, absorb, expand, plan, 0.05,
        )  # fmt: skip

        def chosen_ones(index: IndexInputs = index, inputs: LatentInputs = inputs) -> torch.Tensor:
            return ops.latent_attend(inputs._replace(choice=ops.choose_entries(index)))

        def all_of_them(inputs: LatentInputs = inputs) -> torch.Tensor:
            return ops.latent_attend(inputs)

        is_all = context <= indexer.top_k
        error = relative_error(chosen_ones(), all_of_them().float()) if is_all else 0.0
        if not error < 0.02:
            print(f"sparse_attention: context {context}, {rows} rows: WRONG: {error:.4f}", flush=True)
            continue
        read = rows * (context * 256 + min(context, indexer.top_k) * (rank + rope) * 2) + absorb.nbytes + expand.nbytes
        times = each_ms([chosen_ones]), each_ms([all_of_them])
        yield KernelTiming(
            "sparse_attention", f"a layer of V3.2, {context} tokens", rows, error, *times, read / bandwidth
        )


PARTS: dict[str, Callable[[float, Sequence[int]], Iterator[KernelTiming]]] = {
    "fp8_blocks": lambda speed, rows: chain(
        matrices("fp8_blocks", "F8", (0.01, 0.06), speed, rows), experts("fp8_blocks", "F8", (0.01, 0.06), speed)
    ),
    "fp4_matrices": lambda speed, rows: chain(
        matrices("fp4_matrices", "NV4", (0.01, 0.01), speed, rows),
        experts("fp4_matrices", "NV4", (0.01, 0.01), speed),
        matrices("fp4_matrices", "MXFP4", (0.01, 0.01), speed, rows),
    ),
    "tables": lambda speed, rows: chain.from_iterable(
        matrices("tables", quant, (0.004, 0.004), speed, rows) for quant in ("NF4", "IQ4_NL", "IQ4_XS")
    ),
    "act_order": lambda speed, rows: matrices("act_order", "act order", (0.004, 0.004), speed, rows),
    "sparse_attention": lambda speed, _rows: sparse_attention(speed),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *PARTS], help="what to time; all by default")
    parser.add_argument("--seconds", type=float, default=420, help="no further row is begun after so many")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="of products with matrices")
    parser.add_argument("--output", type=Path, help="a JSON file of all rows")
    options = parser.parse_args()
    began, rows = time.monotonic(), []
    bandwidth = copy_bandwidth()
    print(torch.cuda.get_device_name(), f"copies {bandwidth / 1e9:.2f} TB/s")
    print(f"{'kernels':13} {'what':28} {'rows':>5}  error   new ms   old ms    floor  old / new", flush=True)
    for name in options.names or PARTS:
        for row in PARTS[name](bandwidth, options.rows):
            print(row, flush=True)
            rows.append(row)
            if options.output is not None:
                options.output.write_text(json.dumps([asdict(one) for one in rows], indent=1))
            if time.monotonic() - began > options.seconds:
                print("time is up")
                return


if __name__ == "__main__":
    with torch.inference_mode():
        main()
