"""Starts of two builds on one GPU, in turns: seconds from a new process to the first token of Llama-3.1-8B's shape.

    python benchmarks/gpu_start_turns.py OLD_TREE [NEW_TREE] [--quantization fp8,int4] [--warm 1] [--limit 90]

Each tree has kernel caches of its own, and each start is a new process that imports from its tree alone. A cold start
empties the caches first; the warm ones after it (`--warm`) find the kernels of the first token there. Rounds go on up
to the limit; which tree comes first changes with every pair of starts. Prints a table for people and one JSON object as
the last line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parents[1]

START = """
import time
started = time.perf_counter()
import json, os, sys
tree, shape, device, quantization = sys.argv[1:]
import tokenmill
assert os.path.realpath(tokenmill.__file__).startswith(os.path.realpath(tree) + os.sep), tokenmill.__file__
from tokenmill import LLM, SamplingParams
imported = time.perf_counter()
settings = dict(load_format="dummy", dtype="bfloat16", device=device, quantization=quantization, max_running=1024,
                token_budget=8192, max_context=8192, max_waiting=4096)
if os.path.isdir(os.path.join(tree, "tokenmill/engine/startup")):  # builds before it knew only the fast start
    settings["fast_start"] = True
llm = LLM(shape, **settings)
loaded = time.perf_counter()
llm.generate([list(range(1000, 1032))], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), progress=False)
ended = time.perf_counter()
seconds = {"import_s": imported - started, "load_s": loaded - imported, "first_token_s": ended - started}
print(json.dumps(seconds), flush=True)
os._exit(0)
"""


def start(tree: Path, shape: Path, device: str, quantization: str, caches: Path) -> dict[str, float]:
    """One start, in a session of its own: compilers that work beside it end with it."""
    libraries = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    others = [part for part in libraries if not (Path(part) / "tokenmill").is_dir()]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), *others]),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "CUDA_CACHE_PATH": str(caches / "cuda"),
        "XDG_CACHE_HOME": str(caches / "xdg"),
        "TOKENMILL_HOME": str(caches / "home"),
    }
    command = [sys.executable, "-P", "-c", START, str(tree), str(shape), device, quantization]
    with subprocess.Popen(
        command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            end_session(process.pid)
    if process.returncode:
        raise SystemExit(f"the start of {tree} with {quantization} failed with {process.returncode}:\n{output}")
    found: dict[str, float] = json.loads(output.strip().splitlines()[-1])
    return found


def end_session(session: int) -> None:
    """End all processes of a session. Compilers, which have process groups of their own, would slow the next start."""
    while members := [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if session_of(entry) == session]:
        for process in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def session_of(process: Path) -> int | None:
    """The session of a process that has not ended."""
    try:
        state, _, _, session, *_ = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(session)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=HERE)
    parser.add_argument("--shape", type=Path, default=HERE / "benchmarks/shapes/llama-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quantization", default="fp8,int4")
    parser.add_argument("--warm", type=int, default=1, help="warm starts after a cold one")
    parser.add_argument("--limit", type=float, default=90, help="seconds after which no two starts begin")
    given = parser.parse_args()
    trees = {"old": given.old.resolve(), "new": given.new.resolve()}
    shape = given.shape.resolve()
    began = time.perf_counter()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # What a machine does once is not counted: libraries are read from disk, the driver wakes, modules are compiled.
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", *map(str, trees.values())], check=False)
        round_of_starts = ("cold", *["warm"] * given.warm)
        kinds = [(quantization, kind) for quantization in given.quantization.split(",") for kind in round_of_starts]
        start(trees["new"], shape, given.device, kinds[0][0], Path(folder) / "uncounted")
        longest_s, turn = 0.0, 0
        while time.perf_counter() - began + longest_s < given.limit:
            pair_began = time.perf_counter()
            round_number, place = divmod(turn, len(kinds))
            quantization, kind = kinds[place]
            num_before = len(found.get(f"{quantization} {kind} new", []))
            for name in ("old", "new") if num_before % 2 == 0 else ("new", "old"):
                caches = Path(folder) / name / quantization
                if kind == "cold":
                    shutil.rmtree(caches, ignore_errors=True)
                one = start(trees[name], shape, given.device, quantization, caches)
                found.setdefault(f"{quantization} {kind} {name}", []).append(one)
                rounded = {key: round(value, 2) for key, value in one.items()}
                print(round_number, quantization, kind, name, rounded, flush=True)
            longest_s = max(longest_s, time.perf_counter() - pair_began)
            turn += 1
    figures = {name: sorted(round(one["first_token_s"], 2) for one in all_of) for name, all_of in found.items()}
    for name, seconds in figures.items():
        print(f"{name:16} median {median(seconds):6.2f} s of {seconds}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
