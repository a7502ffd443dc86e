"""Times decoding steps whose rows have adapters, captured as graphs, beside steps of the model alone.

python benchmarks/gpu_adapters.py DIR_WITH_CONFIG [--rows 32] [--adapters 16] [--rank 16] [--targets experts]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec, MoeSpec
from tokenmill.arch.tensors import tensors_of
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import AdapterSlots, Loader
from tokenmill.ops.low_rank import LowRank
from tokenmill.ops.triton.batch.decode_inputs import RING_SIZE
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.launch import compile_workers
from tokenmill.ops.triton.launch.kernel import compile_in_parallel
from tokenmill.runner.decode_graphs import NO_ADAPTERS, DecodeGraphs, DecodeInputs
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.runner.warmup import WarmUp
from tokenmill.weights.dummy import dummy_weights

BLOCK, MAX_CONTEXT, CONTEXT = 16, 4096, 512
TARGETS = {
    "queries and values": ("q", "v"),
    "attention": ("q", "k", "v", "o"),
    "all matrices": ("q", "k", "v", "o", "gate", "up", "down"),
    "experts": ("experts.gate", "experts.up", "experts.down"),
}


class AdaptedSteps:
    """A model with random weights and its decode graphs."""

    def __init__(self, folder: Path, quantization: str, num_slots: int, rank: int, rows: int) -> None:
        self.spec, device, dtype = read_spec(folder), torch.device("cuda"), torch.bfloat16
        weights = dummy_weights(self.spec, dtype=dtype, device=device)
        has_experts = any(isinstance(layer.mlp, MoeSpec) for layer in self.spec.layers)
        self.slots = AdapterSlots(num_slots, rank, rank if has_experts else 0)
        self.model = Decoder(
            self.spec, Loader(weights, build_ops(quantization), dtype, device, self.slots), MAX_CONTEXT
        )
        per_row = -(-CONTEXT // BLOCK)
        layout = KVLayout.from_spec(self.spec, CacheDtypes("bfloat16"))
        self.storage = KVStorage(layout, 1 + rows * per_row, BLOCK, device)
        draws = DeviceSampler(self.spec.vocab_size, rows, device)
        self.graphs = DecodeGraphs(self.model, self.storage, draws, rows, MAX_CONTEXT // BLOCK + 1, MAX_CONTEXT)
        ids = torch.arange(1, 1 + rows * per_row, device=device, dtype=torch.int32)
        self.graphs.rows.tables[:, :rows, :per_row] = ids.view(rows, per_row)
        self._warm_up = WarmUp(self.model, self.storage, self.graphs, rows, MAX_CONTEXT)
        self._batch = self._warm_up.decoding(rows)
        with torch.inference_mode():
            alone = partial(self._warm_up.compute, self._batch)
            compile_in_parallel(self.graphs.ask_for_kernels, alone).join()

    def compile_adapted(self) -> None:
        """Compile the kernels of steps with the adapters that were put into slots."""
        batch = replace(self._batch, adapters=self.graphs.row_slots[: len(self._batch.token_ids)])
        with torch.inference_mode():
            compile_in_parallel(partial(self._warm_up.compute, batch)).join()

    def ms(self, rows: int, slots: list[int] | None, repeats: int = 30) -> float:
        """Median time of a step; `slots`: of the rows' adapters"""
        if slots is not None:
            self.graphs.row_slots[:rows] = torch.tensor(slots, dtype=torch.int32, device="cuda")
        inputs = DecodeInputs(list(range(rows)), [CONTEXT - 1] * rows, [5] * rows, [0] * rows)
        for _ in range(RING_SIZE):
            self.graphs.start(inputs, "greedy", is_adapted=slots is not None)
        version = NO_ADAPTERS if slots is None else self.slots.version
        captured = self.graphs._captured[(rows, "greedy", version)]
        times = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            captured.graph.replay()
            captured.graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 2)
        return sorted(times)[repeats // 2]


def random_adapter(spec: ModelSpec, parts: tuple[str, ...], rank: int) -> dict[str, LowRank]:
    names = {name.removesuffix(".weight"): one.shape for name, one in tensors_of(spec).items() if one.kind == "linear"}
    dtype, device, found = torch.bfloat16, torch.device("cuda"), {}
    for name, shape in names.items():
        if name.split(".", 2)[-1] not in parts:
            continue
        a = torch.randn(rank, shape[-1], dtype=dtype, device=device) * 0.01
        b = torch.randn(shape[-2], rank, dtype=dtype, device=device) * 0.01
        if len(shape) == 2:
            found[name] = LowRank(a, b)
        else:  # the same numbers for all experts, which lie apart in the slot
            found |= {f"{name}.{expert}": LowRank(a, b) for expert in range(shape[0])}
    return found


def mixes(rows: int, num_adapters: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the slots of a step's rows."""
    yield "base rows in an adapted graph", [0] * rows
    yield "one adapter", [1] * rows
    yield "all adapters", [1 + row % num_adapters for row in range(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization", default="none", choices=("none", "fp8", "int8", "int4"))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=list(TARGETS)[:3])
    given = parser.parse_args()
    compile_workers.enable()  # one kernel after the other would take minutes
    without = AdaptedSteps(given.model, given.quantization, 0, 0, given.rows)
    base = without.ms(given.rows, None)
    del without
    torch.cuda.empty_cache()
    steps = AdaptedSteps(given.model, given.quantization, given.adapters, given.rank, given.rows)
    found = {"no slots": base, "base rows only": steps.ms(given.rows, None)}
    for title in given.targets:
        for slot in range(1, 1 + given.adapters):
            steps.slots.put(slot, random_adapter(steps.spec, TARGETS[title], given.rank))
        steps.compile_adapted()
        found |= {f"{title}, {mix}": steps.ms(given.rows, slots) for mix, slots in mixes(given.rows, given.adapters)}
    for title, ms in found.items():
        print(f"{title}: {ms:.3f} ms, {ms / base - 1:+.1%}")
    print(json.dumps({"model": given.model.name, **vars(given), "model_folder": None, "ms": found}, default=str))


if __name__ == "__main__":
    main()
