"""One rank of a model for several, alone on a GPU: its step, what that consists of, and what the planner says of it.

    python benchmarks/gpu_rank_alone.py [--shape FOLDER] [--ranks 8] [--rows 8,32,128] [--context 1024] [--sums]

The first rank's part of a model, run by the engine's own runner with captured graphs; what other ranks would
send has come already. Its step is compared with the planner's for that part, with the bandwidth and the time of a
layer's kernels that the same run fits to models of 1B and 8B, and with the time of putting ranks' parts together, which
is measured apart; then a table of tokens a second with the time that each kind of link takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_ranks import BLOCK, SHAPES, device, dtype, numbers, part_of, storage_of
from step_kernels import step_kernels

from tokenmill.arch.cost import decode_step_bytes, decode_step_flops, weight_parts
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.engine.build import assemble
from tokenmill.ops.triton.batch.exchange import ARRIVAL_BYTES
from tokenmill.ops.triton.launch import compile_workers
from tokenmill.parallel.cuts import Cut, MatrixCut, cut_model
from tokenmill.parallel.device import WINDOW_BYTES, DeviceGroup
from tokenmill.parallel.group import Gather, RankGroup, SingleRank, Sum
from tokenmill.params import SamplingParams
from tokenmill.planner.device import PlanDevice, plan_device
from tokenmill.planner.links import LINKS
from tokenmill.planner.memory import Split
from tokenmill.planner.roofline import Roofline, Speeds
from tokenmill.types import Request

STEPS, PROFILED_AT = 80, 40  # of a run's steps, those with kernels
MATRIX_BYTES = 96 << 20  # more than a GPU's cache holds
BUDGET = 2048  # tokens of a step, and so of the prompts that each step of a run's start computes


@dataclass(frozen=True)
class LocalWindow:
    """A rank's window in memory of this process."""

    memory: torch.Tensor

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def close(self) -> None:
        pass


def unheard(size: int) -> RankGroup:
    """The group of rank 0 where only this rank is there: what others would send are zeros that have come already. All
    that a rank does itself in an exchange is done."""
    if size == 1:
        return SingleRank()

    def windows(_group: DeviceGroup) -> list[LocalWindow]:
        memory = torch.zeros(size, WINDOW_BYTES, dtype=torch.uint8, device=device())
        memory.view(torch.int64)[:, : ARRIVAL_BYTES // 8] = 1 << 62  # a turn that never comes
        return [LocalWindow(memory[rank]) for rank in range(size)]

    return DeviceGroup(0, size, device(), windows)


def step_seconds(
    spec: ModelSpec, ranks: int, rows: list[int], context: int, kernels_of: Collection[int] = (), *, sums: bool = False
) -> dict[int, float]:
    """Seconds of a decoding step of the first rank's part, by the number of rows. `kernels_of`: of so many rows, print
    the time of each kernel too."""
    group = unheard(ranks)
    most, length = max(rows), context + num_tokens(max(rows), context) + 8
    model = part_of(spec, group, length, deterministic=False, sums=sums)
    storage = storage_of(model, 1 + most * -(-length // BLOCK))
    name: Any = str(dtype()).removeprefix("torch.")
    config = EngineConfig(
        ModelConfig(model="shape", max_context=length, dtype=name),
        CacheConfig(num_blocks=storage.num_blocks, kv_dtype=name, prefix_caching=False),
        SchedulerConfig(max_running=most, token_budget=BUDGET, step_ms=0, speculate="off"),
        OpsConfig(device=device().type, backend="triton", threads=1),  # type: ignore[arg-type]
    )
    core = assemble(config, model, storage)
    core.runner.run_largest_step(BUDGET, 1 << 30, lambda: None)
    found = {}
    for count in rows:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        for number in range(count):
            prompt = np.random.default_rng(number).integers(3, 2000, context).tolist()
            name = f"{count}-{number}"
            tokens = num_tokens(count, context)
            core.add(Request(request_id=name, prompt_token_ids=prompt, params=params, max_tokens=tokens, seed=0))
        seconds: list[float] = []
        while core.has_work:
            began_s = time.perf_counter()
            outputs = core.step()
            if len(outputs) == count:
                seconds.append(time.perf_counter() - began_s)
            if count in kernels_of and len(seconds) == PROFILED_AT:
                print(f"{spec.num_layers} layers, {count} rows, rank 0 of {ranks}:")
                step_kernels(core.step).print()
        found[count] = median(seconds[8:-4])
    return found


def num_tokens(rows: int, context: int) -> int:
    """Tokens of each answer, so that all rows decode together for a run's steps: the first begin while the last ones'
    prompts are computed."""
    return STEPS + rows * context // BUDGET


def mean_context(rows: int, context: int) -> int:
    """The mean context of the steps that are timed."""
    return context + STEPS // 2 + rows * context // BUDGET // 2


def exchange_seconds(spec: ModelSpec, ranks: int, rows: list[int], *, sums: bool) -> dict[int, float]:
    """Seconds in which a rank exchanges in a step, by the number of rows, where what others send is there already:
    puts together the parts of heads, of the output of `o`, of inner numbers and of the output of `down` in each layer,
    or adds up both outputs. As in a step, what others sent is not in the GPU's cache, where a matrix has taken its
    place; what the rank computed itself is."""
    cuts, group = cut_model(spec, ranks), unheard(ranks)
    gathered = gathered_of(cuts["layers.0.o"], cuts["layers.0.down"])
    found: list[Sum | Gather] = [Gather(group, ((cut, True),)) for cut in gathered]
    widths = [cut.widths[0] for cut in gathered]
    if sums:
        found, widths = [Sum(group)] * 2, [spec.hidden_size] * 2
    seconds = {}
    matrix = torch.zeros(MATRIX_BYTES // 4 if torch.cuda.is_available() else 1, device=device())
    for count in rows:
        parts = [torch.zeros(count, width, dtype=dtype(), device=device()) for width in widths]

        def step(*, exchanges: bool, parts: list[torch.Tensor] = parts) -> None:
            for _ in range(spec.num_layers):
                for number, part in enumerate(parts):
                    matrix.amax()
                    part.zero_()
                    if exchanges:
                        found[number](part)

        seconds[count] = replay_seconds(partial(step, exchanges=True)) - replay_seconds(partial(step, exchanges=False))
    return seconds


def gathered_of(*cuts: MatrixCut) -> list[Cut]:
    """The inputs and outputs of matrices that ranks gather, in the order of a layer."""
    return [cut for matrix in cuts for cut in (matrix.inputs, matrix.rows) if cut is not None]


def replay_seconds(step: Callable[[], None]) -> float:
    """The median time of a step as a captured graph; on a CPU as it is."""
    step()
    run: Callable[[], Any] = step
    if torch.cuda.is_available():
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    found = []
    for _ in range(20):
        began_s = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began_s)
    return median(found)


def alone(asked: argparse.Namespace) -> dict[str, Any]:
    spec, plan = read_spec(asked.shape), plan_device("H200")
    seen: list[tuple[list[float], float]] = []  # bytes, layers and operations of a step; its seconds
    small: dict[str, Any] = {}
    for name in ("llama-1b", "llama-8b"):
        shape = read_spec(SHAPES / name)
        small[name] = step_seconds(shape, 1, asked.rows, asked.context, asked.kernels_of)
        for rows, seconds in small[name].items():
            context = mean_context(rows, asked.context)
            moved = decode_step_bytes(shape, weight_parts(shape, "bfloat16"), "bfloat16", rows, context)
            seen.append(([moved, shape.num_layers, decode_step_flops(shape, rows, context)], seconds))
        print(f"{name} on one rank: {', '.join(f'{rows} rows {s * 1e3:.2f} ms' for rows, s in small[name].items())}")
        torch.cuda.empty_cache()
    calibrated, errors = fitted(seen)
    reached, layer_s = calibrated.bandwidth_bytes_s, calibrated.layer_s
    print(
        f"fitted to both: {reached / 1e12:.2f} TB/s, {calibrated.decode_flops_s / 1e12:.0f} TFLOP/s and"
        f" {layer_s * 1e6:.1f} us a layer; off by {', '.join(f'{error:+.1%}' for error in errors)}"
    )
    torch.cuda.empty_cache()
    ways = {sums: shard_figures(spec, asked, plan, calibrated, sums=sums) for sums in (False, True)[: 1 + asked.sums]}
    return {"small_s": small, "layer_s": layer_s, "reached_bytes_s": reached, "shard": ways[False],
            "reached_flops_s": calibrated.decode_flops_s, "sums": ways.get(True), "ranks": asked.ranks}  # fmt: skip


def fitted(seen: list[tuple[list[float], float]]) -> tuple[Speeds, list[float]]:
    """The planner's speeds of a device that steps were measured on, as `tokenmill plan` has them of a calibrated one:
    arithmetic and memory add up. Every step counts by its relative error; these errors are returned too."""
    costs = np.array([[amount / seconds for amount in amounts] for amounts, seconds in seen])
    found, *_ = np.linalg.lstsq(costs, np.ones(len(seen)), rcond=None)
    per_byte, layer_s, per_flop = (max(float(one), 1e-18) for one in found)
    speeds = Speeds(1 / per_flop, 1 / per_flop, 1 / per_byte, 0.0, overlap=False, layer_s=layer_s)
    return speeds, (costs @ (per_byte, layer_s, per_flop) - 1.0).tolist()


def shard_figures(
    spec: ModelSpec, asked: argparse.Namespace, plan: PlanDevice, calibrated: Speeds, *, sums: bool
) -> list[dict[str, Any]]:
    """Steps of the first rank beside planned ones, by the number of rows."""
    ranks, table = asked.ranks, []
    split = Split(ranks, has_sums=sums)
    shard = step_seconds(spec, ranks, asked.rows, asked.context, asked.kernels_of, sums=sums)
    gathering = exchange_seconds(spec, ranks, asked.rows, sums=sums)
    torch.cuda.empty_cache()
    for rows, seconds in shard.items():
        parts, context = weight_parts(spec, "bfloat16"), mean_context(rows, asked.context)
        roofline = Roofline(spec, parts, "bfloat16", plan, split, calibrated)
        exchange_s = roofline.decode_s(rows, context) * roofline.exchange_share(rows, context)
        planned = roofline.decode_s(rows, context) - exchange_s + gathering[rows]
        default = Roofline(spec, parts, "bfloat16", plan, split, Speeds.of_device(plan, "bfloat16"))
        listed = default.decode_s(rows, context) * (1 - default.exchange_share(rows, context))
        links = {}
        for link in ("nvlink", "pcie5", "ib", "ethernet"):
            away = replace(plan, linked_by=LINKS[link])
            over_link = Roofline(spec, parts, "bfloat16", away, split, calibrated)
            exchanged_s = over_link.decode_s(rows, context) * over_link.exchange_share(rows, context)
            links[link] = rows / (seconds - gathering[rows] + exchanged_s)
        figures = {"rows": rows, "step_s": seconds, "planned_s": planned, "exchanges_s": gathering[rows]}
        table.append({**figures, "listed_s": listed, "tok_s": links})
        told = ", ".join(f"{link} {rate:,.0f}" for link, rate in links.items())
        print(
            f"rank 0 of {ranks}{', sums' if sums else ''}, {rows:3} rows: {seconds * 1e3:6.2f} ms,"
            f" planned {planned * 1e3:6.2f}"
            f" ({seconds / planned - 1:+.0%}; {gathering[rows] * 1e3:.2f} of it exchanges),"
            f" from the table {listed * 1e3:6.2f}; tok/s over {told}",
            flush=True,
        )
    return table


def main() -> int:
    compile_workers.enable()  # one process after the other would take minutes
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, default=SHAPES / "llama-70b", help="a folder with a config.json")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=numbers, default=[8, 32, 128])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kernels-of", type=numbers, default=[], help="of so many rows, print each kernel's time")
    parser.add_argument("--sums", action="store_true", help="also the way that sums over ranks")
    print(json.dumps(alone(parser.parse_args())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
