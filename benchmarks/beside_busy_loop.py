"""How much of its decode speed an engine keeps when another process spins on one of its cores.

    python benchmarks/beside_busy_loop.py MODEL.gguf [--peer-python PYTHON] [--engines tokenmill,llama.cpp,openvino]

Every engine takes turns with and without a busy loop beside it, `--rounds` times; what is printed is the median of
the share kept, round by round. The loop is an ordinary process at ordinary priority, as a neighbour's would be. The
machine must otherwise be idle: a core that is already contended shows nothing.

Linux shares cores between sessions first (`kernel.sched_autogroup_enabled`): a loop of the same session as the engine
gets half of one core; one of its own session (`--apart`), as another terminal's would be, gets two thirds of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.bench.compare import ComparedEngine, engines
from tokenmill.bench.measures import spread


@contextmanager
def busy_loop(is_apart: bool) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=is_apart)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def decode_speed(engine: ComparedEngine, asked: dict[str, int]) -> float:
    found = engine.measure(asked)["decode_tok_s"]
    assert found is not None
    return found


def kept_shares(engine: ComparedEngine, shape: dict[str, int], rounds: int, is_apart: bool) -> list[float]:
    shares = []
    for number in range(rounds):
        alone = decode_speed(engine, {**shape, "seed": 2 * number})
        with busy_loop(is_apart):
            beside = decode_speed(engine, {**shape, "seed": 2 * number + 1})
        shares.append(beside / alone)
    return shares


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engines", default="tokenmill,llama.cpp,openvino")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", default="1,16")
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--apart", action="store_true", help="the loop is in a session of its own")
    return parser.parse_args()


def main() -> None:
    args = parse()
    results = []
    levels = [int(level) for level in args.concurrency.split(",")]
    shapes = [{"input_len": 64, "output_len": args.output_len, "concurrency": level} for level in levels]
    ours = ("auto", json.dumps({**shapes[-1], "concurrency": max(levels), "seed": 0}))
    with engines(args.engines.split(","), args.peer_python, args.model, args.threads, ours=ours) as running:
        for concurrency, shape in zip(levels, shapes, strict=True):
            for engine in running:
                kept = spread(kept_shares(engine, shape, args.rounds, args.apart))
                results.append({"engine": engine.name, "concurrency": concurrency, "kept": vars(kept)})
                print(f"{engine.name:12s} {concurrency:3d} sequences: keeps {kept} of its speed", flush=True)
    print(json.dumps({"benchmark": "beside_busy_loop", "model": args.model.name, "results": results}))


if __name__ == "__main__":
    main()
