"""Run the in-process engine step by step and record the time of each step.

    add requests of token ids ─► step ─► step ─► ...          a StepRecord each
                                  │
                                  └ time in the model's kernels (with torch: in its forward and head), the rest is the
                                    host's: plan, inputs, sampler, bookkeeping

A request is in prefill until its first output token, and in decode afterwards.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenmill.engine.core import EngineCore
from tokenmill.engine.startup.garbage_collection import relaxed_gc
from tokenmill.errors import RequestFailed
from tokenmill.params import SamplingParams
from tokenmill.types import Request, SequenceOutput


@dataclass(frozen=True)
class StepRecord:
    step_s: float
    model_s: float | None  # in the model itself; None where it was not timed
    num_new_tokens: int
    is_full_decode: bool  # every request was past its first token and none had finished

    @property
    def host_s(self) -> float | None:
        return None if self.model_s is None else self.step_s - self.model_s


@dataclass
class StepRun:
    """The steps and times of one set of requests."""

    steps: list[StepRecord] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)  # since the run began, per request, as they came
    elapsed_s: float = 0.0
    num_output_tokens: int = 0
    waiting: set[str] = field(default_factory=set)  # requests without a token yet
    alive: int = 0

    def record(self, output: SequenceOutput, at_s: float) -> int:
        """Record the output of a step for one request; return the number of new tokens."""
        if output.finish_reason == "error":
            raise RequestFailed(output.error or "the request failed")
        if output.token_ids and output.request_id in self.waiting:
            self.waiting.discard(output.request_id)
            self.first_token_s.append(at_s)
        self.alive -= output.finish_reason is not None
        self.num_output_tokens += len(output.token_ids)
        return len(output.token_ids)

    @property
    def full_decode(self) -> list[StepRecord]:
        return [step for step in self.steps if step.is_full_decode]


class Clock(Protocol):
    @property
    def spent_s(self) -> float:
        """Seconds spent in the model so far."""
        ...


class KernelClock:
    """Kernel and host time of a model that times its own kernels; inputs and everything around them count as host."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def spent_s(self) -> float:
        return float(self._model.kernel_s)


class ModelClock:
    """A proxy of the runner's model that sums the time spent inside it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.spent_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, *args: Any) -> Any:
        return self._timed(self.model.forward, args)

    def logits(self, *args: Any) -> Any:
        return self._timed(self.model.logits, args)

    def _timed(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.spent_s += time.perf_counter() - began


@contextmanager
def model_clock(core: EngineCore) -> Iterator[Clock]:
    runner: Any = core.runner
    if hasattr(runner.model, "kernel_s"):
        yield KernelClock(runner.model)
        return
    clock = ModelClock(runner.model)
    runner.model = clock
    try:
        yield clock
    finally:
        runner.model = clock.model


def drive(core: EngineCore, requests: Sequence[Request], clock: Clock | None = None) -> StepRun:
    """Run the requests to their end.

    A step lasts from the end of the one before to its own end: a GPU computes already while the host processes the
    outputs of the step before. Garbage is collected as seldom as in `LLM.generate` and in a server's core.
    """
    with relaxed_gc():
        return _run_steps(core, requests, clock)


def _run_steps(core: EngineCore, requests: Sequence[Request], clock: Clock | None) -> StepRun:
    run = StepRun(waiting={request.request_id for request in requests}, alive=len(requests))
    began = time.perf_counter()
    for request in requests:
        core.add(request)
    ended = time.perf_counter()
    while core.has_work:
        is_full = not run.waiting and run.alive == len(requests)
        model_before = clock.spent_s if clock else 0.0
        outputs = core.step()
        last_ended, ended = ended, time.perf_counter()
        num_new = sum(run.record(output, ended - began) for output in outputs)
        in_model = clock.spent_s - model_before if clock else None
        run.steps.append(StepRecord(ended - last_ended, in_model, num_new, is_full))
    run.elapsed_s = time.perf_counter() - began
    return run


def random_requests(
    input_lens: Sequence[int], output_lens: Sequence[int], vocab_size: int, *, seed: int, name: str
) -> list[Request]:
    """Make requests with random token ids, without common prefixes, and answers of exactly the given lengths."""
    rng = random.Random(f"{seed}/{name}")
    return [
        Request(
            request_id=f"{name}-{number}",
            prompt_token_ids=[rng.randrange(vocab_size) for _ in range(input_len)],
            params=SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True),
            max_tokens=output_len,
            seed=number,
            arrival_s=time.monotonic(),
        )
        for number, (input_len, output_len) in enumerate(zip(input_lens, output_lens, strict=True))
    ]
