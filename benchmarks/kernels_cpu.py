"""How near the native matrix products come to the machine's limits: GB/s where weights are read once for one row,
GFLOP/s where many rows share them, per block format and shape, against the measured read bandwidth.

    python benchmarks/kernels_cpu.py [--threads 2] [--formats Q8_0,Q4_0] [--rows 1,4,16,512] [--repeats 30]

Several copies of a matrix are used in turn so that small ones do not come from the cache. The best and the median of
the repeats are shown: on a shared machine the best is nearest to what the kernel can do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from tokenmill.ops.cpu.availability import instruction_set, native
from tokenmill.ops.cpu.decoder import OUTLIER_THRESHOLDS

SHAPES = {  # (outputs, inputs)
    "smollm2 qkv/o": (576, 576),
    "smollm2 gate": (1536, 576),
    "smollm2 down": (576, 1536),
    "1b o": (2048, 2048),
    "1b gate": (8192, 2048),
    "1b down": (2048, 8192),
}
FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
CACHE_BYTES = 96 << 20  # copies of a matrix together exceed any cache
MAX_COPIES = 64


def random_matrix(kind: str, rows: int, columns: int, seed: int) -> Any:
    source = np.random.default_rng(seed).integers(0, 60, (rows, native().source_row_bytes(kind, columns)), np.uint8)
    return native().pack(kind, rows, columns, source)  # bytes below 60 are small finite halves in every format


def copies_of(kind: str, shape: tuple[int, int], rows: int) -> list[Any]:
    first = random_matrix(kind, *shape, seed=0)
    wanted = 1 if rows > 16 else min(MAX_COPIES, CACHE_BYTES // first.num_bytes + 1)
    return [first, *(random_matrix(kind, *shape, seed) for seed in range(1, wanted))]


def show(label: str, seconds: Sequence[float], num_bytes: int, flops: float) -> None:
    best, middle = min(seconds), median(seconds)
    speeds = f"{num_bytes / best / 1e9:8.1f} {num_bytes / middle / 1e9:8.1f} {flops / best / 1e9:8.0f}"
    print(f"{label:34s} {best * 1e6:9.0f} {speeds} {flops / middle / 1e9:8.0f}")


def measure(bench: Any, kind: str, shape: tuple[int, int], rows: int, repeats: int) -> tuple[list[float], int]:
    matrices = copies_of(kind, shape, rows)
    seconds = bench.time_linear(matrices, rows, max(repeats, 2 * len(matrices)) if rows <= 16 else repeats)
    return seconds, matrices[0].num_bytes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1,4,16,512")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--isa", default="", help="instruction set; the best by default")
    parser.add_argument("--activation-bits", choices=tuple(OUTLIER_THRESHOLDS), default="8")
    return parser.parse_args()


def main() -> None:
    args = parse()
    bench = native().Bench(args.threads, args.isa, OUTLIER_THRESHOLDS[args.activation_bits])
    read = min(bench.time_read(256 << 20, 12))
    print(
        f"{args.isa or instruction_set()}, {args.threads} threads, read bandwidth {(256 << 20) / read / 1e9:.1f} GB/s"
    )
    print(f"{'format shape rows':34s} {'best µs':>9s} {'GB/s':>8s} {'median':>8s} {'GFLOP/s':>8s} {'median':>8s}")
    for kind in args.formats.split(","):
        for name in args.shapes.split(","):
            if SHAPES[name][1] % (256 if kind.endswith("_K") else 32):
                continue
            for rows in map(int, args.rows.split(",")):
                seconds, num_bytes = measure(bench, kind, SHAPES[name], rows, args.repeats)
                flops = 2.0 * rows * SHAPES[name][0] * SHAPES[name][1]
                show(f"{kind} {name} {rows}", seconds, num_bytes, flops)


if __name__ == "__main__":
    main()
