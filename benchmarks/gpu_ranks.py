"""Ranks of one model on one GPU: the bits of every number of ranks, and the speed of one rank of a larger model alone.

    python benchmarks/gpu_ranks.py bits [--shape FOLDER] [--layers N] [--ranks 1,2,4,8]
    python benchmarks/gpu_ranks.py alone [--shape FOLDER] [--ranks 8] [--rows 8,32,128] [--context 1024]

`bits`: ranks as threads that take turns (`parallel/turns.py`), with the kernels of --deterministic: a prompt, a
decoding step, and the same step as one captured graph of all ranks. Prints a digest of the logits for each number of
ranks: they must be equal.

`alone`: the first rank's part of a model, run by the engine's own runner with captured graphs; what other ranks would
send has come already. Its step is compared with the planner's for that part, with the bandwidth and the time of a
layer's kernels that the same run fits to models of 1B and 8B, and with the time of putting ranks' parts together, which
is measured apart; then a table of tokens a second with the time that each kind of link takes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from tokenmill.arch.cost import decode_step_bytes, weight_parts
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.engine.build import assemble
from tokenmill.engine.core import EngineCore
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.launch import compile_workers
from tokenmill.parallel.alone import Alone
from tokenmill.parallel.cuts import Cuts, cut_model, cut_spec
from tokenmill.parallel.device import ARRIVAL_BYTES, WINDOW_BYTES, DeviceGroup
from tokenmill.parallel.group import Gather, RankGroup, Shard
from tokenmill.parallel.turns import TurnGroup
from tokenmill.params import SamplingParams
from tokenmill.planner.device import plan_device
from tokenmill.planner.links import LINKS
from tokenmill.planner.memory import Split
from tokenmill.planner.roofline import Roofline, Speeds
from tokenmill.runner.inputs import build_batch
from tokenmill.types import Request, RowPlan
from tokenmill.weights.dummy import dummy_weights
from tokenmill.weights.rank_weights import RankWeights

SHAPES = Path(__file__).parent / "shapes"
BLOCK, PROMPT, ROWS = 16, 40, 4
PROFILED_AT, PROFILED_STEPS = 60, 10  # of the 80 steps of a run
SEVENTY_B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32  # an interpreter has no bfloat16


def part_of(spec: ModelSpec, group: RankGroup, max_context: int, *, deterministic: bool) -> Decoder:
    """A rank's part of a model with random weights."""
    cuts = Cuts(group.rank, group.size, cut_model(spec, group.size) if group.size > 1 else {})
    layers = range(spec.num_layers)
    source = RankWeights(dummy_weights(spec, dtype=dtype(), device=device()), cuts, layers)
    load = Loader(source, build_ops(deterministic=deterministic), dtype(), device(), shard=Shard(group, cuts, layers))
    return Decoder(cut_spec(spec, group.size, group.rank), load, max_context)


def storage_of(model: Decoder, num_blocks: int) -> KVStorage:
    name = str(dtype()).removeprefix("torch.")
    return KVStorage(KVLayout.from_spec(model.spec, CacheDtypes(name, name)), num_blocks, BLOCK, device())


# ── bits ───────────────────────────────────────────────────────────────────────────────────────────────


def plans(start: int, count: int) -> list[RowPlan]:
    draw = np.random.default_rng(start)
    return [
        RowPlan(row=row, start=start, token_ids=draw.integers(3, 200, count).tolist(), table_updates=[])
        for row in range(ROWS)
    ]


def digest(logits: torch.Tensor) -> str:
    return hashlib.sha256(logits.float().cpu().numpy().tobytes()).hexdigest()[:16]


def steps_of(spec: ModelSpec, group: TurnGroup, stream: Any) -> list[str]:
    """Digests of a prompt's logits, of a step's, and of the same step's as a graph."""
    group.wait_turn()
    model = part_of(spec, group, 512, deterministic=True)
    blocks = -(-(PROMPT + 1) // BLOCK)
    storage = storage_of(model, 1 + ROWS * blocks)
    tables = (1 + np.arange(ROWS * blocks, dtype=np.int32)).reshape(1, ROWS, blocks)
    batches = [
        build_batch(plans(start, count), [[count - 1]] * ROWS, tables, BLOCK, device())
        for start, count in ((0, PROMPT), (PROMPT, 1))
    ]
    found = [digest(model.logits(model.forward(batch, storage))) for batch in batches]
    if stream is not None:
        captured = replace(batches[1], mode="captured")
        model.logits(model.forward(captured, storage), "captured")  # kernels are compiled
        together(group)
        torch.cuda.synchronize()
        together(group)
        graph: Any = torch.cuda.CUDAGraph() if group.rank == 0 else None
        with torch.cuda.stream(stream):
            if graph is not None:
                graph.capture_begin(capture_error_mode="relaxed")
            logits = model.logits(model.forward(captured, storage), "captured")
            together(group)
            if graph is not None:
                graph.capture_end()
        together(group)
        if graph is not None:
            graph.replay()
            torch.cuda.synchronize()
            found.append(digest(logits))
    together(group)
    group.pass_turn()
    return found


def together(group: TurnGroup) -> None:
    """Wait until all ranks are here."""
    group.pass_turn()
    group.wait_turn()


def bits(asked: argparse.Namespace) -> dict[str, Any]:
    spec = read_spec(asked.shape or SHAPES / "llama-8b")
    if asked.layers:
        spec = replace(spec, layers=spec.layers[: asked.layers])
    found = {}
    for size in asked.ranks:
        began_s = time.perf_counter()
        stream: Any = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
        groups = TurnGroup.make(size)

        def work(group: TurnGroup, stream: Any = stream) -> list[str]:
            try:
                return steps_of(spec, group, stream)
            except BaseException:
                group.abort()
                raise

        with ThreadPoolExecutor(size) as threads:
            futures = [threads.submit(work, group) for group in groups]
            found[size] = futures[0].result()
        print(f"tp {size}: {' '.join(found[size])}   {time.perf_counter() - began_s:.1f} s", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    is_equal = len({tuple(each) for each in found.values()}) == 1
    print("equal bits" if is_equal else "DIFFERENT BITS")
    return {"digests": found, "is_equal": is_equal, "layers": spec.num_layers}


# ── one rank alone ─────────────────────────────────────────────────────────────────────────────────────


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
        return Alone()

    def windows(_group: DeviceGroup) -> list[LocalWindow]:
        memory = torch.zeros(size, WINDOW_BYTES, dtype=torch.uint8, device=device())
        memory.view(torch.int64)[:, : ARRIVAL_BYTES // 8] = 1 << 62  # a turn that never comes
        return [LocalWindow(memory[rank]) for rank in range(size)]

    return DeviceGroup(0, size, device(), windows)


def step_seconds(
    spec: ModelSpec, ranks: int, rows: list[int], context: int, kernels_of: Collection[int] = ()
) -> dict[int, float]:
    """Seconds of a decoding step of the first rank's part, by the number of rows. `kernels_of`: of so many rows, print
    the time of each kernel too."""
    group = unheard(ranks)
    most, length = max(rows), context + 128
    model = part_of(spec, group, length, deterministic=False)
    storage = storage_of(model, 1 + most * -(-length // BLOCK))
    name: Any = str(dtype()).removeprefix("torch.")
    config = EngineConfig(
        ModelConfig(model="shape", max_context=length, dtype=name),
        CacheConfig(num_blocks=storage.num_blocks, kv_dtype=name, prefix_caching=False),
        SchedulerConfig(max_running=most, token_budget=2048, step_ms=0, speculate="off"),
        OpsConfig(device=device().type, backend="triton", threads=1),  # type: ignore[arg-type]
    )
    core = assemble(config, model, storage)
    core.runner.run_largest_step(2048, 1 << 30, lambda: None)
    found = {}
    for count in rows:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        for number in range(count):
            prompt = np.random.default_rng(number).integers(3, 2000, context).tolist()
            name = f"{count}-{number}"
            core.add(Request(request_id=name, prompt_token_ids=prompt, params=params, max_tokens=80, seed=0))
        seconds: list[float] = []
        while core.has_work:
            began_s = time.perf_counter()
            outputs = core.step()
            if len(outputs) == count:
                seconds.append(time.perf_counter() - began_s)
            if count in kernels_of and len(seconds) == PROFILED_AT:
                print_kernels(core)
        found[count] = median(seconds[8:-4])
    return found


def print_kernels(core: EngineCore) -> None:
    """Print which kernels the next steps take how long, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED_STEPS):
            core.step()
        torch.cuda.synchronize()
    spent = sorted(profile.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    for kernel in spent[:16]:
        each, count = kernel.self_device_time_total / PROFILED_STEPS, kernel.count / PROFILED_STEPS
        print(f"  {each:8.1f} us a step, {count:6.1f} times {each / count:6.2f} us  {kernel.key[:90]}", flush=True)


def gather_seconds(spec: ModelSpec, ranks: int, rows: list[int]) -> dict[int, float]:
    """Seconds in which a rank puts the parts of all ranks together in a step, by the number of rows: heads, the output
    of `o`, inner numbers and the output of `down` of each layer."""
    cuts, group = cut_model(spec, ranks), unheard(ranks)
    found = [
        cuts["layers.0.o"].inputs,
        cuts["layers.0.o"].rows,
        cuts["layers.0.down"].inputs,
        cuts["layers.0.down"].rows,
    ]
    gathers = [(Gather(group, ((cut, True),)), cut.widths[0]) for cut in found if cut is not None]
    seconds = {}
    for count in rows:
        parts = [torch.zeros(count, width, dtype=dtype(), device=device()) for _, width in gathers]

        def step(parts: list[torch.Tensor] = parts) -> None:
            for _ in range(spec.num_layers):
                for (gather, _), part in zip(gathers, parts, strict=True):
                    gather(part)

        seconds[count] = replay_seconds(step)
    return seconds


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
    with tempfile.TemporaryDirectory() as folder:
        if asked.shape is None:
            (Path(folder) / "config.json").write_text(json.dumps(SEVENTY_B))
        spec = read_spec(asked.shape or Path(folder))
    plan = plan_device("H200")
    context = asked.context + 40
    seen: list[tuple[float, float, float]] = []  # bytes, layers, seconds
    small: dict[str, Any] = {}
    for name in ("llama-1b", "llama-8b"):
        shape = read_spec(SHAPES / name)
        small[name] = step_seconds(shape, 1, asked.rows, asked.context)
        for rows, seconds in small[name].items():
            moved = decode_step_bytes(shape, weight_parts(shape, "bfloat16"), "bfloat16", rows, context)
            seen.append((moved, shape.num_layers, seconds))
        print(f"{name} on one rank: {', '.join(f'{rows} rows {s * 1e3:.2f} ms' for rows, s in small[name].items())}")
        torch.cuda.empty_cache()
    moved_and_layers = np.array([[moved, layers] for moved, layers, _ in seen])
    (per_byte, layer_s), *_ = np.linalg.lstsq(moved_and_layers, np.array([s for *_, s in seen]), rcond=None)
    reached = 1 / float(per_byte)
    print(f"fitted to both: {reached / 1e12:.2f} TB/s, and {layer_s * 1e6:.1f} us a layer")
    flops = plan.peak_flops("bfloat16") * plan.mfu
    calibrated = Speeds(flops, flops, reached, float(layer_s) * spec.num_layers)
    torch.cuda.empty_cache()
    shard = step_seconds(spec, asked.ranks[-1], asked.rows, asked.context, asked.kernels_of)
    ranks, table = asked.ranks[-1], []
    gathering = gather_seconds(spec, ranks, asked.rows)
    for rows, seconds in shard.items():
        parts = weight_parts(spec, "bfloat16")
        roofline = Roofline(spec, parts, "bfloat16", plan, Split(ranks), calibrated)
        exchange_s = roofline.decode_s(rows, context) * roofline.exchange_share(rows, context)
        planned = roofline.decode_s(rows, context) - exchange_s + gathering[rows]
        default = Roofline(spec, parts, "bfloat16", plan, Split(ranks), Speeds.of_device(plan, "bfloat16"))
        listed = default.decode_s(rows, context) * (1 - default.exchange_share(rows, context))
        links = {}
        for link in ("nvlink", "pcie5", "ib", "ethernet"):
            away = replace(plan, linked_by=LINKS[link])
            over_link = Roofline(spec, parts, "bfloat16", away, Split(ranks), calibrated)
            exchanged_s = over_link.decode_s(rows, context) * over_link.exchange_share(rows, context)
            links[link] = rows / (seconds - gathering[rows] + exchanged_s)
        figures = {"rows": rows, "step_s": seconds, "planned_s": planned, "gathers_s": gathering[rows]}
        table.append({**figures, "listed_s": listed, "tok_s": links})
        told = ", ".join(f"{link} {rate:,.0f}" for link, rate in links.items())
        print(
            f"rank 0 of {ranks}, {rows:3} rows: {seconds * 1e3:6.2f} ms, planned {planned * 1e3:6.2f}"
            f" ({seconds / planned - 1:+.0%}; {gathering[rows] * 1e3:.2f} of it gathers),"
            f" from the table {listed * 1e3:6.2f}; tok/s over {told}"
        )
    return {"small_s": small, "layer_s": float(layer_s), "reached_bytes_s": reached, "shard": table, "ranks": ranks}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    compile_workers.enable()  # one process after the other would take minutes
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bits", "alone"])
    parser.add_argument("--shape", type=Path, help="a folder with a config.json; Llama 8B or 70B by default")
    parser.add_argument("--layers", type=int, default=0, help="the first of them only")
    parser.add_argument("--ranks", type=numbers, default=None)
    parser.add_argument("--rows", type=numbers, default=[8, 32, 128])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kernels-of", type=numbers, default=[], help="alone: so many rows; print each kernel's time")
    asked = parser.parse_args()
    asked.ranks = asked.ranks or ([1, 2, 4, 8] if asked.what == "bits" else [8])
    print(json.dumps(bits(asked) if asked.what == "bits" else alone(asked)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
