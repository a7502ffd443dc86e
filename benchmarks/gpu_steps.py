"""Times one decoding step, captured as a graph. Its rows have different tokens, so routed experts differ as in a batch.

python benchmarks/gpu_steps.py DIR_WITH_CONFIG [--quantization none|fp8|int8|int4] [--rows 8,32]
python benchmarks/gpu_steps.py DIR_WITH_CONFIG --blocks Q4_K      weights as a file of that format has them
python benchmarks/gpu_steps.py DIR_WITH_CONFIG --expert-blocks MXFP4 --block-size 128     DeepSeek V4's, of some layers
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tokenmill.arch.packed_formats import StoredFormat
from tokenmill.arch.read import read_spec
from tokenmill.arch.tensors import tensors_of
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.triton.batch.decode_inputs import RING_SIZE
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.launch import compile_workers
from tokenmill.ops.triton.launch.kernel import compile_in_parallel
from tokenmill.runner.decode_graphs import DecodeGraphs, DecodeInputs
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.runner.warmup import WarmUp
from tokenmill.weights.dummy import dummy_weights

MAX_ROWS, MAX_CONTEXT = 1024, 8192
TOKEN_STRIDE = 997  # between the token ids of neighbouring rows


class Steps:
    def __init__(self, given: argparse.Namespace, most_rows: int) -> None:
        spec, device, dtype, block = read_spec(given.model), torch.device("cuda"), torch.bfloat16, given.block_size
        compile_workers.enable()  # one kernel after the other would take minutes
        experts = {name: StoredFormat(given.expert_blocks) for name in tensors_of(spec) if ".experts." in name}
        stored = experts if given.expert_blocks else None
        weights = dummy_weights(spec, dtype=dtype, quant=given.blocks, device=device, stored=stored)
        model = Decoder(spec, Loader(weights, build_ops(given.quantization), dtype, device), MAX_CONTEXT)
        blocks_a_row = -(-given.context // block)
        name = str(dtype).removeprefix("torch.")
        layout = KVLayout.from_spec(spec, CacheDtypes(name, name))
        num_blocks = len(layout.paged) * most_rows * blocks_a_row
        self.storage = KVStorage(layout, 1 + num_blocks, block, device)
        draws = DeviceSampler(spec.vocab_size, MAX_ROWS, device)
        self.graphs = DecodeGraphs(model, self.storage, draws, MAX_ROWS, MAX_CONTEXT // block + 1, MAX_CONTEXT)
        ids = torch.arange(1, 1 + num_blocks, device=device, dtype=torch.int32).view(-1, most_rows, blocks_a_row)
        rows = torch.tensor(layout.rows_per_block, dtype=torch.int32, device=device).view(-1, 1, 1)
        self.graphs.rows.tables[:, :most_rows, :blocks_a_row] = ids * rows
        self.context, self.vocab_size = given.context, spec.vocab_size
        warm_up = WarmUp(model, self.storage, self.graphs, MAX_ROWS, MAX_CONTEXT)
        with torch.inference_mode():
            asks = [partial(warm_up.compute, warm_up.decoding(count)) for count in map(int, given.rows.split(","))]
            compile_in_parallel(self.graphs.ask_for_kernels, *asks).join()

    def ms(self, num_rows: int, repeats: int = 12) -> float:
        """Median of the times of two replays"""
        self.graphs._captured.clear()
        self.graphs._pool = torch.cuda.graph_pool_handle()
        rows = list(range(num_rows))
        tokens = [(5 + TOKEN_STRIDE * row) % self.vocab_size for row in rows]
        for _ in range(RING_SIZE):  # whose turn it may be when graphs are replayed by hand
            self.graphs.start(DecodeInputs(rows, [self.context - 1] * num_rows, tokens, [0] * num_rows), "greedy")
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
    parser.add_argument("--expert-blocks", help="a format of the experts alone")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    given = parser.parse_args()
    rows = [int(number) for number in given.rows.split(",")]
    steps = Steps(given, max(rows))
    for num_rows in rows:
        how = given.blocks or given.expert_blocks or given.quantization
        print(f"{how}, {num_rows} rows: {steps.ms(num_rows):.3f} ms", flush=True)


if __name__ == "__main__":
    main()
