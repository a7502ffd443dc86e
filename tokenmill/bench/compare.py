"""Comparison of several engines with the same model file, in turns on one machine.

Each engine runs in a process of its own (`peers/`), loaded once. In every round each measures every concurrency in
turn; while one works the others are stopped. The report has the ratio of medians, and the spread of the ratios of
single rounds: a slow minute of the machine affects all engines of a round.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.bench.measures import Spread, median, spread
from tokenmill.errors import InvalidConfig, RequestFailed

PEERS = {"llama.cpp": "llama_cpp_peer.py", "openvino": "openvino_peer.py", "tokenmill": "ours.py"}
BINARY = "llama-batched-bench"  # a program that was given, not a package
BINARY_PEER = "batched_bench_peer.py"
OURS = "tokenmill"
FIGURES = ("prefill_tok_s", "decode_tok_s")

Turn = tuple[str, dict[str, int], dict[str, float | None]]  # engine, what was asked, its figures


class ComparedEngine:
    """The process of one engine, stopped (SIGSTOP) between turns."""

    def __init__(self, name: str, python: str, model: Path, threads: int, more: Sequence[str] = ()) -> None:
        script = Path(__file__).parent / "peers" / PEERS.get(name, BINARY_PEER)
        self.name, self.version = name, ""
        self._errors = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115  lives on
        self._process = subprocess.Popen(
            [python, str(script), str(model), str(threads), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)} if name == OURS else None,
        )

    def wait_ready(self) -> None:
        self.version = str(self._answer()["version"])
        self._pause()

    def measure(self, asked: dict[str, int]) -> dict[str, float | None]:
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            return self._answer()
        finally:
            self._pause()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.send_signal(signal.SIGCONT)
        self._process.communicate()
        self._errors.close()

    def _pause(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)

    def _answer(self) -> dict[str, Any]:
        """Return the next line that is a JSON object; libraries print other lines in between."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:] or ["no message"]
        raise RequestFailed(f"{self.name} ended: {last[0][:300]}", hint=_remedy(last[0]))


def _remedy(last_line: str) -> str | None:
    """Return a hint for the most common failure: a Python without the peer's package."""
    if not last_line.startswith("ModuleNotFoundError"):
        return None
    installed = "pip install llama-cpp-python openvino-genai"
    return f"{installed}, name a Python that has it with --peer-python, or leave it out with --peers"


@contextmanager
def engines(
    names: Sequence[str],
    peer_python: str,
    model: Path,
    threads: int,
    binary: Path | None = None,
    ours: Sequence[str] = (),
) -> Iterator[list[ComparedEngine]]:
    """Start the engines. `binary`: a `llama-batched-bench` to include; `ours`: further arguments of our own script."""
    unknown = set(names) - set(PEERS)
    if unknown:
        known = ", ".join(peer for peer in PEERS if peer != OURS)
        raise InvalidConfig(f"unknown peer {sorted(unknown)[0]}; known are {known}", param="peers")
    with ExitStack() as stack:
        started = []
        found = str(binary.resolve()) if binary is not None else ""  # a bare name would be looked for on PATH
        more = {BINARY: (found,), OURS: ours}
        for name in (BINARY, *names) if binary is not None else names:
            python = sys.executable if name in (OURS, BINARY) else peer_python
            engine = ComparedEngine(name, python, model, threads, more.get(name, ()))
            stack.callback(engine.close)
            engine.wait_ready()
            started.append(engine)
        yield started


@dataclass(frozen=True)
class Comparison:
    """One figure of one engine at one concurrency, against ours."""

    engine: str
    concurrency: int
    figure: str
    values: list[float]
    ratio: Spread | None  # ours / theirs, round by round; None for ours

    def as_dict(self) -> dict[str, Any]:
        ratio = vars(self.ratio) if self.ratio else None
        return {**vars(self), "median": median(self.values), "ratio": ratio}


def take_turns(running: Sequence[ComparedEngine], shapes: Sequence[dict[str, int]], rounds: int) -> Iterator[Turn]:
    """Measure every engine with every shape in every round; the first engine changes from round to round."""
    for number in range(rounds):
        order = [*running[number % len(running) :], *running[: number % len(running)]]
        for shape in shapes:
            for engine in order:
                yield engine.name, shape, engine.measure({**shape, "seed": number})


def compared(turns: Sequence[Turn]) -> list[Comparison]:
    found: dict[tuple[str, int, str], list[float]] = {}
    for name, shape, figures in turns:
        for figure in FIGURES:
            value = figures[figure]
            if value is not None:
                found.setdefault((name, shape["concurrency"], figure), []).append(value)
    return [
        Comparison(name, concurrency, figure, values, _ratio(found, name, concurrency, figure))
        for (name, concurrency, figure), values in found.items()
    ]


def _ratio(found: dict[tuple[str, int, str], list[float]], name: str, concurrency: int, figure: str) -> Spread | None:
    ours = found.get((OURS, concurrency, figure))
    if name == OURS or ours is None:
        return None
    return spread([mine / theirs for mine, theirs in zip(ours, found[name, concurrency, figure], strict=True)])
