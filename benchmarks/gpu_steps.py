"""Times one decoding step, captured as a graph, with the products of a few rows cut in different ways.

    python benchmarks/gpu_steps.py DIR_WITH_CONFIG [--quantization none|fp8|int8|int4] [--rows 8,32] [--tune]
    python benchmarks/gpu_steps.py DIR_WITH_CONFIG --blocks Q4_K      weights as a file of that format has them

Kernels overlap (see `tokenmill/ops/triton/overlap.py`), so a cut is judged by the whole step, not by its own time. With
--tune each kind of matrix gets the cut that makes the step fastest, one after the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tokenmill.arch.read import read_spec
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.loading import Loader
from tokenmill.ops.triton.batch.decode_inputs import RING_SIZE
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.gemm import linear, splitk
from tokenmill.ops.triton.gemm.splitk import SplitKConfig
from tokenmill.ops.triton.quant import gemm_fp8_split, quantized
from tokenmill.runner.decode_graphs import DecodeGraphs, DecodeInputs
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.weights.dummy import dummy_weights

MAX_ROWS, BLOCK, MAX_CONTEXT = 1024, 16, 8192


class Steps:
    def __init__(self, folder: Path, quantization: str, blocks: str | None, context: int, most_rows: int) -> None:
        spec, device, dtype = read_spec(folder), torch.device("cuda"), torch.bfloat16
        weights = dummy_weights(spec, dtype=dtype, quant=blocks, device=device)
        model = Decoder(spec, Loader(weights, build_ops(quantization), dtype, device), MAX_CONTEXT)
        blocks_a_row = -(-context // BLOCK)
        layout = KVLayout.from_spec(spec, CacheDtypes(str(dtype).removeprefix("torch.")))
        self.storage = KVStorage(layout, 1 + most_rows * blocks_a_row, BLOCK, device)
        draws = DeviceSampler(spec.vocab_size, MAX_ROWS, device)
        self.graphs = DecodeGraphs(model, self.storage, draws, MAX_ROWS, MAX_CONTEXT // BLOCK + 1, MAX_CONTEXT)
        ids = torch.arange(1, 1 + most_rows * blocks_a_row, device=device, dtype=torch.int32)
        self.graphs.rows.tables[:, :most_rows, :blocks_a_row] = ids.view(most_rows, blocks_a_row)
        self.context = context

    def ms(self, num_rows: int, repeats: int = 12) -> float:
        """Median of the times of two replays"""
        self.graphs._captured.clear()
        self.graphs._pool = torch.cuda.graph_pool_handle()
        rows = list(range(num_rows))
        for _ in range(RING_SIZE):  # whose turn it may be when graphs are replayed by hand
            self.graphs.start(DecodeInputs(rows, [self.context - 1] * num_rows, [5] * num_rows, [0] * num_rows), "best")
        (captured,) = self.graphs._captured.values()
        graph = captured.graph
        times = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 2)
        return sorted(times)[repeats // 2]


def cuts(quantization: str, num_rows: int) -> Iterator[SplitKConfig]:
    strides, stages = {
        "none": ((128,), (4,)),
        "fp8": ((128, 256), (4, 6)),
        "int8": ((32,), (3, 4, 6)),
        "int4": ((32,), (3, 4) if num_rows > 8 else (3, 4, 6)),
    }[quantization]
    for stride, splits, stage, fetched in product(strides, (1, 2, 4, 8, 16), stages, (0, 256, 512)):
        if stride * stage <= 1024:
            yield SplitKConfig(64, stride, splits, stage, fetched)


def tune(steps: Steps, quantization: str, num_rows: int) -> None:
    chosen: dict[tuple[int, ...], SplitKConfig] = {}
    tuned = {"none": (splitk, "cut_for"), "fp8": (gemm_fp8_split, "cut_for")}
    holder, name = tuned.get(quantization, (quantized, "words_cut_for"))
    usual = getattr(holder, name)
    met: dict[tuple[int, ...], None] = {}

    def cut_for(rows: int, *shape: int) -> SplitKConfig | None:
        met[shape[:2]] = None
        return chosen.get(shape[:2]) or usual(rows, *shape)

    setattr(holder, name, cut_for)
    best = steps.ms(num_rows)
    for shape in list(met):
        found = []
        for cut in cuts(quantization, num_rows):
            chosen[shape] = cut
            found.append((steps.ms(num_rows), cut))
        chosen.pop(shape)
        found.sort(key=lambda one: one[0])
        if found[0][0] < best:
            best, chosen[shape] = found[0]
        print(f"  {shape}: " + "; ".join(f"{ms:.3f} {cut}" for ms, cut in found[:3]), flush=True)
    setattr(holder, name, usual)
    print(f"  tuned {best:.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization", default="none", choices=("none", "fp8", "int8", "int4"))
    parser.add_argument("--blocks")
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tune", action="store_true")
    given = parser.parse_args()
    rows = [int(number) for number in given.rows.split(",")]
    steps = Steps(given.model, given.quantization, given.blocks, given.context, max(rows))
    for num_rows in rows:
        print(f"{given.blocks or given.quantization}, {num_rows} rows: {steps.ms(num_rows):.3f} ms", flush=True)
        if given.tune:
            tune(steps, given.quantization, num_rows)


if __name__ == "__main__":
    assert linear.strips is splitk, "the products look their cuts up where they are changed here"
    main()
