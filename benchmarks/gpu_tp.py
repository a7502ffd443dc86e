"""Tensor parallel ranks through the engine, as processes that share one GPU under CUDA MPS: bits and step times.

    python benchmarks/gpu_tp.py [--ranks 1,2,4,8] [--rows 8,32] [--deterministic | --sums] [--shape FOLDER]

Each number of ranks is a program of its own, started as `--tp N --rank-gpus 0,0,...` would. It computes greedy answers
of several batch sizes and the logprobs of some, with random weights. With --deterministic all digests must be equal.
The steps are compared with the planner's: one rank's own step, since all ranks together read what one reads and share
the GPU, and four gathers a layer over the link `one_gpu`.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from gpu_exchange import mps_daemon, numbers

SHAPES = Path(__file__).parent / "shapes"
MAX_TOKENS, LOGPROB_ROWS = 60, 4
STACKS_S = 5.0  # before a run is given up


def digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def dump_stacks() -> None:
    """Write where all ranks are to standard error: of a start or a step that does not end."""
    faulthandler.dump_traceback(all_threads=True)
    own = os.getpid()
    for child in Path(f"/proc/{own}/task/{own}/children").read_text().split():
        if Path(f"/proc/{child}/comm").read_text().startswith("rank-"):
            os.kill(int(child), signal.SIGUSR2)  # which a rank answers with its stacks


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """One number of ranks, in this process and those that it starts."""
    from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, ParallelConfig, SchedulerConfig
    from tokenmill.engine.build import build_core
    from tokenmill.params import SamplingParams
    from tokenmill.types import Request

    size, most = asked.size, max(asked.rows)
    length = asked.context + MAX_TOKENS + 8
    gpus = ",".join(["0"] * size) if size > 1 else None
    config = EngineConfig(
        ModelConfig(model=str(asked.shape), load_format="dummy", max_context=length, dtype="bfloat16"),
        CacheConfig(num_blocks=2 + most * -(-length // 16), prefix_caching=False),
        SchedulerConfig(max_running=most, token_budget=2048, step_ms=0, speculate="off"),
        OpsConfig(device="cuda", backend="triton", threads=1, deterministic=asked.deterministic),
        ParallelConfig(tp=size, rank_gpus=gpus),
    )
    for moment_s in (asked.limit / 2, asked.limit - STACKS_S):
        watch = threading.Timer(moment_s, dump_stacks)
        watch.daemon = True
        watch.start()
    began_s = time.perf_counter()
    core = build_core(config, asked.shape, fast_start=True)
    found: dict[str, Any] = {"ranks": size, "start_s": round(time.perf_counter() - began_s, 1), "steps_s": {}}
    core.run_idle_task()  # compilers that work beside the first steps

    def run(name: str, count: int, **params: Any) -> tuple[list[Any], list[float]]:
        for number in range(count):
            prompt = np.random.default_rng(number).integers(3, 2000, asked.context - number % 7).tolist()
            chosen = SamplingParams(ignore_eos=True, **params)
            core.add(
                Request(
                    request_id=f"{name}-{number}", prompt_token_ids=prompt, params=chosen, max_tokens=MAX_TOKENS, seed=7
                )
            )
        said: dict[str, list[Any]] = {}
        seconds: list[float] = []
        while core.has_work:
            began_s = time.perf_counter()
            outputs = core.step()
            if len(outputs) == count:
                seconds.append(time.perf_counter() - began_s)
            for one in outputs:
                assert one.error is None, one.error
                said.setdefault(one.request_id, []).extend([*one.token_ids, *(lp.logprob for lp in one.logprobs or ())])
        return sorted(said.items()), seconds

    digests = {}
    for count in asked.rows:
        said, seconds = run(str(count), count, temperature=0.0)
        digests[f"greedy {count}"] = digest(said)
        found["steps_s"][count] = median(seconds[8:-4])
    digests["sampled"] = digest(run("sampled", min(8, most), temperature=0.9, top_p=0.95)[0])
    digests["logprobs"] = digest(run("logprobs", LOGPROB_ROWS, temperature=0.0, logprobs=5)[0])
    found["digests"] = digests
    return found


def exchange_seconds(shape: Path, ranks: int, rows: int, *, sums: bool) -> float:
    """What the planner says that ranks of one GPU exchange in a step."""
    from dataclasses import replace

    from tokenmill.arch.cost import weight_parts
    from tokenmill.arch.read import read_spec
    from tokenmill.planner.device import plan_device
    from tokenmill.planner.links import LINKS
    from tokenmill.planner.memory import Split
    from tokenmill.planner.roofline import Roofline, Speeds

    spec, device = read_spec(shape), replace(plan_device("H200"), linked_by=LINKS["one_gpu"])
    speeds = Speeds.of_device(device, "bfloat16")
    roofline = Roofline(spec, weight_parts(spec, "bfloat16"), "bfloat16", device, Split(ranks, has_sums=sums), speeds)
    return roofline.decode_s(rows, 256) * roofline.exchange_share(rows, 256)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, default=SHAPES / "llama-8b", help="a folder with a config.json")
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=numbers, default=[8, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--sums", action="store_true", help="add up products of ranks, where the engine does not yet")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for one number of ranks")
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.size is not None:
        print(json.dumps(measure(asked)), flush=True)
        sys.stdout.flush()
        os._exit(0)
    results: dict[int, dict[str, Any]] = {}
    with mps_daemon() as there:
        trials = "gpu_ranks,gpu_sums" if asked.sums else "gpu_ranks"
        env = {**os.environ, **there, "TOKENMILL_UNPROVEN_KERNELS": trials}
        for size in asked.ranks:
            try:
                done = subprocess.run(
                    [sys.executable, *sys.argv, "--size", str(size)],
                    env=env, stdout=subprocess.PIPE, text=True, timeout=asked.limit, check=True,
                )  # fmt: skip
            except subprocess.SubprocessError as error:
                print(f"{size} ranks failed: {error}", flush=True)
                continue
            results[size] = json.loads(done.stdout.splitlines()[-1])
            print(json.dumps(results[size]), flush=True)
            for rows, seconds in results[size]["steps_s"].items() if 1 in results and size > 1 else ():
                planned = results[1]["steps_s"][rows] + exchange_seconds(asked.shape, size, int(rows), sums=asked.sums)
                told = f"{seconds * 1e3:.2f} ms, planned {planned * 1e3:.2f} ({seconds / planned - 1:+.0%})"
                print(f"{size} ranks on one GPU, {rows} rows: {told}", flush=True)
    digests = {tuple(one["digests"].values()) for one in results.values()}
    print("equal digests" if len(digests) == 1 else "DIFFERENT DIGESTS", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
