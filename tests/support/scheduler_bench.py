"""A scheduler with a simulated runner, and a clock that advances once per step."""

from __future__ import annotations

from tests.support.simulated_runner import EOS, SimulatedRunner
from tokenmill.config.engine import SchedulerConfig
from tokenmill.kv.cache import KVCache
from tokenmill.kv.names import Fetcher
from tokenmill.params import SamplingParams
from tokenmill.scheduler import Scheduler
from tokenmill.types import Request, SequenceOutput, StepPlan


class SchedulerBench:
    """A scheduler, its runner, and a clock that advances once per step."""

    def __init__(
        self, num_blocks: int = 200, prefix_caching: bool = True, fetcher: Fetcher | None = None, **config: object
    ) -> None:
        self.cache = KVCache(windows=[None], num_blocks=num_blocks, block_size=4, prefix_caching=prefix_caching)
        self.now = 0.0
        settings = SchedulerConfig(**{"max_running": 8, "token_budget": 32, **config})  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            config=settings, cache=self.cache, max_rows=8, clock=lambda: self.now, fetcher=fetcher
        )
        self.runner = SimulatedRunner(self.cache)
        self.plans: list[StepPlan] = []

    def step(self) -> list[SequenceOutput]:
        plan = self.scheduler.plan()
        assert plan is not None
        self.plans.append(plan)
        self.now += 1.0
        outputs = self.scheduler.apply(self.runner.run(plan))
        self.scheduler.check_integrity()
        return outputs

    def drain(self) -> list[SequenceOutput]:
        outputs = []
        while self.scheduler.has_work:
            outputs += self.step()
        assert self.cache.num_used == 0
        return outputs


def ask(name: str, prompt_len: int = 8, max_tokens: int = 5, priority: int = 0, **params: object) -> Request:
    number = sum(map(ord, name))
    return Request(
        request_id=name,
        prompt_token_ids=[number % 40 + 5, *range(10, 9 + prompt_len)],
        params=SamplingParams(**{"ignore_eos": True, **params}),  # type: ignore[arg-type]
        eos_token_ids=[EOS],
        max_tokens=max_tokens,
        seed=number,
        priority=priority,
    )


def tokens_of(outputs: list[SequenceOutput], name: str, index: int = 0) -> list[int]:
    return [t for o in outputs if o.request_id == name and o.index == index for t in o.token_ids]


def endings(outputs: list[SequenceOutput]) -> list[tuple[str, int, str]]:
    return [(o.request_id, o.index, o.finish_reason) for o in outputs if o.finish_reason]
