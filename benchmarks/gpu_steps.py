"""Times one decoding step, captured as a graph.

python benchmarks/gpu_steps.py DIR_WITH_CONFIG [--quantization none|fp8|int8|int4] [--rows 8,32]
python benchmarks/gpu_steps.py DIR_WITH_CONFIG --blocks Q4_K      weights as a file of that format has them
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tokenmill.arch.read import read_spec
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.triton.batch.decode_inputs import RING_SIZE
from tokenmill.ops.triton.build import build_ops
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
            self.graphs.start(
                DecodeInputs(rows, [self.context - 1] * num_rows, [5] * num_rows, [0] * num_rows), "greedy"
            )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization", default="none", choices=("none", "fp8", "int8", "int4"))
    parser.add_argument("--blocks")
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--context", type=int, default=512)
    given = parser.parse_args()
    rows = [int(number) for number in given.rows.split(",")]
    steps = Steps(given.model, given.quantization, given.blocks, given.context, max(rows))
    for num_rows in rows:
        print(f"{given.blocks or given.quantization}, {num_rows} rows: {steps.ms(num_rows):.3f} ms", flush=True)


if __name__ == "__main__":
    main()
