"""Ranks of one model on one GPU, as threads that take turns: the bits of every number of ranks, and how near sums are.

    python benchmarks/gpu_ranks.py bits [--shape FOLDER] [--layers N] [--ranks 1,2,4,8]
    python benchmarks/gpu_ranks.py near [--shape FOLDER] [--layers N] [--ranks 1,2,4,8]

`bits`: ranks as threads that take turns (`parallel/threads.py`), with the kernels of --deterministic: a prompt, a
decoding step, and the same step as one captured graph of all ranks. Prints a digest of the logits for each number of
ranks: they must be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.launch import compile_workers
from tokenmill.parallel.cuts import Cuts, cut_model, cut_spec
from tokenmill.parallel.group import RankGroup, Shard
from tokenmill.parallel.threads import TurnGroup
from tokenmill.runner.inputs import build_batch
from tokenmill.types import RowPlan
from tokenmill.weights.dummy import dummy_weights
from tokenmill.weights.rank_weights import RankWeights

SHAPES = Path(__file__).parent / "shapes"
Result = TypeVar("Result")
BLOCK, PROMPT, ROWS = 16, 40, 4
CLEAR = 0.3  # of the logits' standard deviation: a best token that is so far above the next


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32  # an interpreter has no bfloat16


def part_of(spec: ModelSpec, group: RankGroup, max_context: int, *, deterministic: bool, sums: bool = False) -> Decoder:
    """A rank's part of a model with random weights."""
    cuts = Cuts(group.rank, group.size, cut_model(spec, group.size, sums=sums) if group.size > 1 else {})
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


def steps_of(spec: ModelSpec, group: TurnGroup, *, stream: Any) -> list[str]:
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


def in_turns(size: int, work: Callable[[TurnGroup], Result]) -> Result:
    """What the first of several ranks, threads that take turns, finds."""

    def run(group: TurnGroup) -> Result:
        try:
            return work(group)
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, group) for group in TurnGroup.make(size)]
        found, *_ = [future.result() for future in futures]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def some_layers(asked: argparse.Namespace) -> ModelSpec:
    spec = read_spec(asked.shape or SHAPES / "llama-8b")
    return replace(spec, layers=spec.layers[: asked.layers]) if asked.layers else spec


def bits(asked: argparse.Namespace) -> dict[str, Any]:
    spec, found = some_layers(asked), {}
    for size in asked.ranks:
        began_s = time.perf_counter()
        stream: Any = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
        found[size] = in_turns(size, partial(steps_of, spec, stream=stream))
        print(f"tp {size}: {' '.join(found[size])}   {time.perf_counter() - began_s:.1f} s", flush=True)
    is_equal = len({tuple(each) for each in found.values()}) == 1
    print("equal bits" if is_equal else "DIFFERENT BITS")
    return {"digests": found, "is_equal": is_equal, "layers": spec.num_layers}


# ── how near numbers are without --deterministic ──────────────────────────────────────────────────────


def all_logits(spec: ModelSpec, group: TurnGroup, *, sums: bool) -> torch.Tensor:
    """The logits behind every token of some prompts, and of a token behind each, on the host."""
    group.wait_turn()
    model = part_of(spec, group, 512, deterministic=False, sums=sums)
    blocks = -(-(PROMPT + 1) // BLOCK)
    storage = storage_of(model, 1 + ROWS * blocks)
    tables = (1 + np.arange(ROWS * blocks, dtype=np.int32)).reshape(1, ROWS, blocks)
    logits = []
    for start, count in ((0, PROMPT), (PROMPT, 1)):
        batch = build_batch(plans(start, count), [list(range(count))] * ROWS, tables, BLOCK, device())
        logits.append(model.logits(model.forward(batch, storage)).float().cpu())
    together(group)
    group.pass_turn()
    return torch.cat(logits)


def near(asked: argparse.Namespace) -> dict[str, Any]:
    spec, found = some_layers(asked), []
    one = in_turns(1, partial(all_logits, spec, sums=False))
    scale, (first, second) = one.std().item(), one.topk(2, dim=-1).values.unbind(-1)
    is_clear = first - second > CLEAR * scale
    for size in asked.ranks:
        for sums in (False, True) if size > 1 else ():
            several = in_turns(size, partial(all_logits, spec, sums=sums))
            away = (several - one).abs().flatten() / scale
            other = several.argmax(-1) != one.argmax(-1)
            figures = {
                "ranks": size, "sums": sums, "rms": away.square().mean().sqrt().item(), "most": away.max().item(),
                "tokens": len(one), "clear": int(is_clear.sum()), "other_best": int(other.sum()),
                "other_clear": int((other & is_clear).sum()),
            }  # fmt: skip
            print(json.dumps(figures), flush=True)
            found.append(figures)
    return {"near": found, "logits_std": scale, "layers": spec.num_layers}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    compile_workers.enable()  # one process after the other would take minutes
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bits", "near"])
    parser.add_argument("--shape", type=Path, help="a folder with a config.json; Llama 8B by default")
    parser.add_argument("--layers", type=int, default=0, help="the first of them only")
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4, 8])
    asked = parser.parse_args()
    print(json.dumps(bits(asked) if asked.what == "bits" else near(asked)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
