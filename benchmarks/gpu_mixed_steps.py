"""Times steps of a prompt's chunk beside 32 decoding rows, captured as graphs, and the decoding step alone.

python benchmarks/gpu_mixed_steps.py DIR_WITH_CONFIG [--chunks 16,64,128] [--starts 0,32768,65000] [--contexts 200,2500]
python benchmarks/gpu_mixed_steps.py DIR_WITH_CONFIG --profile     and which kernels take the time
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tokenmill.arch.read import read_spec
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder, representative_layers
from tokenmill.models.linear import Loader
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.launch import compile_workers
from tokenmill.ops.triton.launch.kernel import compile_in_parallel
from tokenmill.runner.decode_graphs import DecodeGraphs, DecodeInputs
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.runner.mixed_graphs import MixedGraphs
from tokenmill.types import RowPlan
from tokenmill.weights.dummy import dummy_weights

BLOCK = 16


class MixedSteps:
    def __init__(self, folder: Path, num_rows: int, context: int, longest: int) -> None:
        spec, device, dtype = read_spec(folder), torch.device("cuda"), torch.bfloat16
        weights = dummy_weights(spec, dtype=dtype, device=device)
        model = Decoder(spec, Loader(weights, build_ops(), dtype, device), longest)
        layout = KVLayout.from_spec(spec, CacheDtypes("bfloat16"))
        each, most = -(-context // BLOCK), -(-longest // BLOCK)
        storage = KVStorage(layout, 1 + num_rows * each + most, BLOCK, device)
        draws = DeviceSampler(spec.vocab_size, num_rows + 1, device)
        self.graphs = DecodeGraphs(model, storage, draws, num_rows + 1, most, longest)
        tables = self.graphs.rows.tables
        ids = torch.randperm(storage.num_blocks - 1, device=device).int() + 1
        tables[:, :num_rows, :each] = ids[: num_rows * each].view(num_rows, each)
        tables[:, num_rows, :most] = ids[num_rows * each :][:most]
        self.mixed = MixedGraphs(model, storage, self.graphs, num_rows + 1, longest)
        self.num_rows = num_rows
        compile_workers.enable()
        some = representative_layers(model)
        compile_in_parallel(partial(self.mixed.ask_for_kernels, some)).join()

    def decode(self, context: int) -> None:
        rows = list(range(self.num_rows))
        count = self.num_rows
        self.graphs.start(DecodeInputs(rows, [context - 1] * count, [5] * count, [0] * count), "greedy")

    def step(self, context: int, start: int, num_tokens: int) -> torch.Tensor:
        plans = [RowPlan(row=row, start=context - 1, token_ids=[5], sample=True) for row in range(self.num_rows)]
        plans.append(RowPlan(row=self.num_rows, start=start, token_ids=[7] * num_tokens))
        return self.mixed.hidden(plans)


def ms(work: object, repeats: int = 7) -> tuple[float, float]:
    """Median milliseconds of a step on the device, one behind the other, and of the host to launch it."""
    assert callable(work)
    work()
    torch.cuda.synchronize()
    found, hosts = [], []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began = time.perf_counter()
        begin.record()
        work()
        work()
        end.record()
        hosts.append((time.perf_counter() - began) / 2)
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 2)
    return sorted(found)[repeats // 2], sorted(hosts)[repeats // 2] * 1e3


def show_kernels(work: object) -> None:
    assert callable(work)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    lines = sorted(seen.key_averages(), key=lambda line: -line.device_time_total)
    for line in lines[:14]:
        print(f"    {line.device_time_total / 1e3:7.3f} ms  {line.count:4} x {line.key[:70]}", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--chunks", default="16,32,64,128")
    parser.add_argument("--starts", default="0,32768,65000")
    parser.add_argument("--contexts", default="200,2500")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    chunks, starts, contexts = (
        [int(one) for one in text.split(",")] for text in (given.chunks, given.starts, given.contexts)
    )
    steps = MixedSteps(given.model, given.rows, max(contexts), max(starts) + max(chunks))
    for context in contexts:
        alone, host = ms(lambda context=context: steps.decode(context))
        print(f"{given.rows} rows of {context}: {alone:.2f} ms (host {host:.2f})", flush=True)
        for start in starts:
            for count in chunks:
                taken, host = ms(lambda c=context, s=start, n=count: steps.step(c, s, n))
                print(f"    {count} tokens behind {start}: {taken:.2f} ms (host {host:.2f})", flush=True)
    if given.profile:
        for start, count in ((0, 64), (max(starts), 16)):
            print(f"{given.rows} rows of {contexts[0]}, {count} tokens behind {start}")
            show_kernels(lambda s=start, n=count: steps.step(contexts[0], s, n))
        print("decoding")
        show_kernels(lambda: steps.decode(contexts[0]))


if __name__ == "__main__":
    main()
