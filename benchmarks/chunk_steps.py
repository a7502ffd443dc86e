"""CPU time of single steps on one thread: a chunk of a prompt, alone or beside decoding rows, by its length and the
length of the context before it.

    python benchmarks/chunk_steps.py MODEL.gguf [--steps 8+4@2048,128@4000] [--kv-dtype float16] [--against OTHER.so]

A step "8+4@2048" has 8 decoding rows (contexts of 100 tokens) and 4 tokens of a prompt after 2,048 others. Time is the
CPU time of the thread and not the time that passes, so figures are valid on a busy machine; what several threads lose
by waiting for each other or for memory is not in it. `--against` measures another build's native module
(`tokenmill/ops/cpu/_native*.so`) in turns with the installed one, in a second process. Prints a table and one JSON
object as the last line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from tokenmill.arch.read import read_spec
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.forward_context import PositionTables
from tokenmill.ops.batch import StepRows
from tokenmill.ops.cpu.decoder import NativeDecoder
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.source import open_weights

NATIVE = "tokenmill.ops.cpu._native"
STEPS = "1+0@0,4+0@0,8+0@0,16+0@0,8+4@2048,8+16@2048,8+64@2048,4@4000,16@4000,64@4000,128@0,128@2048,128@4000,512@0"
BLOCK = 16
BLOCKS_OF_PROMPT, BLOCKS_OF_ROW = 320, 16
CONTEXT_OF_ROW = 100
MAX_ROWS = 16
TURN_S = 0.15  # of each step and build in a round


class TimedStep(NamedTuple):
    num_decoding: int
    num_tokens: int
    start: int


def parse_step(text: str) -> TimedStep:
    found = re.fullmatch(r"(?:(\d+)\+)?(\d+)@(\d+)", text)
    if found is None:
        raise SystemExit(f"not a step: {text}, expected for example 8+4@2048 or 128@0")
    step = TimedStep(int(found[1] or 0), int(found[2]), int(found[3]))
    if step.num_decoding > MAX_ROWS or step.num_tokens + step.start > BLOCK * BLOCKS_OF_PROMPT:
        raise SystemExit(
            f"{text} is too large: at most {MAX_ROWS} rows and {BLOCK * BLOCKS_OF_PROMPT} tokens of a prompt"
        )
    return step


def use_native(path: str) -> None:
    """Make this process use the native module of another build."""
    loader = ExtensionFileLoader(NATIVE, path)
    spec = spec_from_file_location(NATIVE, path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NATIVE] = module


def expand(raw: RawTensor) -> torch.Tensor:
    return dequantize(raw, torch.float32)


class StepTimer:
    """Times steps of a model over a cache of random keys and values."""

    def __init__(self, path: Path, kv_dtype: str) -> None:
        spec = read_spec(path)
        tables = PositionTables.of(spec, BLOCK * BLOCKS_OF_PROMPT, torch.device("cpu")).ropes
        ropes = {rope: (table.cos, table.sin) for rope, table in tables.items()}
        self._model = NativeDecoder(spec, open_weights(path, spec), ropes, expand, 1, activation_bits="mixed")
        num_blocks = BLOCKS_OF_PROMPT + MAX_ROWS * BLOCKS_OF_ROW
        layout = KVLayout.from_spec(spec, CacheDtypes(kv_dtype))
        self._storage = KVStorage(layout, 1 + num_blocks, BLOCK, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        for number in range(spec.num_layers):
            for tensor in self._storage.fields(number).values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape, generator=generator).abs())
                else:
                    tensor.random_(-127, 128, generator=generator)
        self._tables = np.zeros((1, 1 + MAX_ROWS, BLOCKS_OF_PROMPT), np.int32)
        blocks = 1 + np.random.default_rng(0).permutation(num_blocks)
        self._tables[0, 0] = blocks[:BLOCKS_OF_PROMPT]
        self._tables[0, 1:, :BLOCKS_OF_ROW] = blocks[BLOCKS_OF_PROMPT:].reshape(MAX_ROWS, BLOCKS_OF_ROW)

    def times(self, step: TimedStep, seconds: float) -> Iterator[float]:
        """Run a step for so long, at least twice, and yield the CPU seconds of each run."""
        decoding = list(range(1, 1 + step.num_decoding))
        prompt = [[100 + place * 7919 % 4000 for place in range(step.num_tokens)]] if step.num_tokens else []
        rows = StepRows(
            rows=[*decoding, *(0 for _ in prompt)],
            starts=[*(CONTEXT_OF_ROW for _ in decoding), *(step.start for _ in prompt)],
            token_ids=[*([100 + row] for row in decoding), *prompt],
            num_outputs=[*(1 for _ in decoding), *(0 for _ in prompt)],
            tables=self._tables,
            block_size=BLOCK,
        )
        end = time.process_time() + seconds
        for number in range(1000):
            began = time.process_time()
            if number >= 2 and began > end:
                return
            self._model.greedy_next(rows, self._storage)
            yield time.process_time() - began


def serve(connection: Connection, native: str, path: Path, kv_dtype: str) -> None:
    if native:
        use_native(native)
    timer = StepTimer(path, kv_dtype)
    for step in iter(connection.recv, None):
        connection.send(median(timer.times(step, TURN_S)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", default=STEPS)
    parser.add_argument("--kv-dtype", default="float16")
    parser.add_argument("--against", default="")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    steps = {text: parse_step(text) for text in args.steps.split(",")}
    context = multiprocessing.get_context("spawn")
    connections: dict[str, Connection] = {}
    for name, native in {"own": "", **({"other": args.against} if args.against else {})}.items():
        connections[name], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, native, args.model, args.kv_dtype), daemon=True).start()
    found: dict[str, dict[str, list[float]]] = {text: {name: [] for name in connections} for text in steps}
    for number in range(1 + args.rounds):  # the first round warms up
        for text, step in steps.items():
            for name, connection in sorted(connections.items(), reverse=number % 2 == 1):
                connection.send(step)
                found[text][name] += [connection.recv()] if number else []
    for connection in connections.values():
        connection.send(None)
    figures = []
    for text, seconds in found.items():
        own = seconds["own"]
        figure: dict[str, str | float] = {"step": text, "cpu_ms": round(median(own) * 1e3, 2)}
        if args.against:
            figure["other_cpu_ms"] = round(median(seconds["other"]) * 1e3, 2)
            figure["ratio"] = round(median(a / b for a, b in zip(own, seconds["other"], strict=True)), 3)
        print("  ".join(f"{key} {value:>9}" for key, value in figure.items()))
        figures.append(figure)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
