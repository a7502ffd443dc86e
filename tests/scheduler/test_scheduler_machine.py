"""Random lives of a small scheduler: requests come, are aborted, preempted, forked, drafted for; steps fail; up to four
steps are in flight. Every step is checked, and the tokens are those of a request that is alone, one step at a time."""

from __future__ import annotations

from collections import deque

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.integrity import check_in_flight, check_plan
from tests.support.random_drafter import RandomDrafter
from tests.support.simulated_runner import EOS, SimulatedRunner, expected_prompt_logprobs, expected_tokens, histories
from tokenmill.config.engine import SchedulerConfig
from tokenmill.errors import InvalidRequest
from tokenmill.kv.cache import KVCache
from tokenmill.params import BeamParams, SamplingParams
from tokenmill.scheduler import Scheduler
from tokenmill.scheduler.request import mixed_seed
from tokenmill.scheduler.speculation import NO_DRAFTS
from tokenmill.types import BACKGROUND_PRIORITY, ContextShift, Pooling, Request, SequenceOutput, StepPlan, Tenant

MAX_STEPS = 3000
TENANTS = (Tenant(), Tenant(), Tenant(id="a"), Tenant(id="b", weight=3.0), Tenant(id="c", max_sequences=2))
POOLINGS = (Pooling("mean"), Pooling("last"))


class Answers:
    """Outputs of one request, folded as a client would."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.endings: dict[int, SequenceOutput] = {}
        self.prompt_logprobs: list[object] = []

    def take(self, output: SequenceOutput) -> None:
        assert output.index not in self.endings, "an output after the last one"
        self.tokens.setdefault(output.index, []).extend(output.token_ids)
        if output.prompt_logprobs is not None:
            assert output.index == 0
            self.prompt_logprobs.append(output.prompt_logprobs)
        if output.finish_reason:
            self.endings[output.index] = output


def drive(scheduler: Scheduler, runner: SimulatedRunner) -> list[SequenceOutput]:
    plan = scheduler.plan()
    assert plan is not None
    return scheduler.apply(runner.run(plan))


def alone(request: Request) -> dict[int, list[int]]:
    """The same request with a machine for itself."""
    cache = KVCache(windows=[None], num_blocks=2000, block_size=4, prefix_caching=False)
    scheduler = Scheduler(
        config=SchedulerConfig(token_budget=512), cache=cache, max_rows=64, clock=lambda: request.arrival_s
    )
    runner, answers = SimulatedRunner(cache), Answers()
    scheduler.add(request)
    while scheduler.has_work:
        for output in drive(scheduler, runner):
            answers.take(output)
    return answers.tokens


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from([(None,), (None, 6), (5,), (None, 9, 4)]),
        num_blocks=st.integers(14, 50),
        num_states=st.sampled_from([0, 0, 9, 30]),  # 0: no recurrent layers
        block_size=st.sampled_from([1, 2, 4]),
        prefix_caching=st.booleans(),
        max_running=st.integers(3, 8),
        token_budget=st.integers(4, 24),
        wrong_drafts=st.sampled_from([None, None, 0.0, 0.1, 0.5]),
        depth=st.integers(1, 4),
        always_continues=st.booleans(),
    )
    def start(
        self,
        windows,
        num_blocks,
        num_states,
        block_size,
        prefix_caching,
        max_running,
        token_budget,
        wrong_drafts,
        depth,
        always_continues,
    ) -> None:
        recurrent = ("cells", "state") if num_states else ()
        self.cache = KVCache(
            windows=(*windows, *(None for _ in recurrent)),
            kinds=(*("paged" for _ in windows), *recurrent),
            num_blocks=num_blocks,
            num_cells=num_blocks if num_states else 0,
            num_states=num_states,
            block_size=block_size,
            prefix_caching=prefix_caching,
            chunk=8,
        )
        self.config = SchedulerConfig(max_running=max_running, token_budget=token_budget)
        self.now = 0.0
        self.scheduler = Scheduler(
            config=self.config,
            cache=self.cache,
            max_rows=16,
            clock=lambda: self.now,
            drafter=NO_DRAFTS if wrong_drafts is None else RandomDrafter(num_blocks, wrong_drafts),
            continues=lambda new: always_continues or new.seed % 3 > 0,
        )
        self.depth = depth
        self.in_flight: deque[StepPlan] = deque()
        self.runner = SimulatedRunner(self.cache, seed=num_blocks)
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answers] = {}
        self.dropped: set[tuple[str, int]] = set()
        self.failing: set[str] = set()
        self.num_added = 0

    @rule(
        prefix=st.integers(0, 2),
        prefix_len=st.integers(0, 12),
        tail=st.lists(st.integers(1, 9), min_size=1, max_size=8),
        max_tokens=st.integers(0, 24),
        min_tokens=st.integers(0, 3),
        kind=st.sampled_from(["one", "one", "one", "n", "n", "beam", "embed"]),
        width=st.integers(2, 10),
        prompt_logprobs=st.booleans(),
        ignore_eos=st.booleans(),
        priority=st.sampled_from((-1, 0, 1, BACKGROUND_PRIORITY)),
        salt=st.sampled_from(["", "tenant"]),
        tenant=st.sampled_from(TENANTS),
        fails=st.integers(0, 9),
        shift=st.sampled_from([None, None, ContextShift(6, 0, 3), ContextShift(11, 2, 4), ContextShift(14, 4, 5)]),
    )
    def add(
        self,
        prefix,
        prefix_len,
        tail,
        max_tokens,
        min_tokens,
        kind,
        width,
        prompt_logprobs,
        ignore_eos,
        priority,
        salt,
        tenant,
        fails,
        shift,
    ) -> None:
        self.num_added += 1
        if self.depth > 1 and width % 3:  # what can be planned while it is in flight
            kind, prompt_logprobs, max_tokens = "one", False, max(max_tokens, 1)
        params = SamplingParams(
            n={"n": width, "beam": 2}.get(kind, 1),
            beam=BeamParams(min(width, 4), early_stopping=width % 2 == 0) if kind == "beam" else None,
            min_tokens=min(min_tokens, max_tokens),
            ignore_eos=ignore_eos,
            stop_token_ids=[3, 4, 5],
            prompt_logprobs=1 if prompt_logprobs else None,
        )
        request = Request(
            request_id=f"r{self.num_added}",
            prompt_token_ids=[20 + prefix] * prefix_len + tail,
            params=params,
            eos_token_ids=[EOS],
            max_tokens=max_tokens,
            seed=self.num_added,
            priority=priority,
            arrival_s=self.now,
            cache_salt=salt,
            tenant=tenant,
            pooling=POOLINGS[width % 2] if kind == "embed" else None,
            shift=shift if kind in ("one", "n") else None,
        )
        used_before = self.cache.num_used
        try:
            self.scheduler.add(request)
        except InvalidRequest:
            assert self.cache.num_used == used_before
            return
        self.requests[request.request_id] = request
        self.answers[request.request_id] = Answers()
        if request.shift:
            self.runner.shifts |= {mixed_seed(request.seed, index): request.shift for index in range(16)}
        if fails == 0:
            self.failing.add(request.request_id)
            self.runner.fail_rows_of.add(mixed_seed(request.seed, 0))

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def abort(self, data) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.scheduler.abort(request_id)
        self.scheduler.abort(request_id)
        self.dropped |= {(request_id, index) for index in range(16)}

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def abort_sample(self, data) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        index = data.draw(st.integers(0, 3))
        self.scheduler.abort_sequence(request.request_id, index)
        if request.params.beam is None and request.params.num_sequences == request.params.n:  # those that stream
            self.dropped.add((request.request_id, index))

    @rule(count=st.integers(1, 6))
    def steps(self, count) -> None:
        for _ in range(count):
            self.step(abort=None)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def abort_in_mid_step(self, data) -> None:
        self.step(abort=data.draw(st.sampled_from(sorted(self.requests))))

    @precondition(lambda self: self.scheduler.has_work)
    @rule()
    def fail_a_whole_step(self) -> None:
        self.step(abort=None, fails=True)

    def step(self, abort: str | None, *, fails: bool = False) -> None:
        """Launch until `depth` steps are in flight, then collect the oldest."""
        self.now += 1.0
        self.launch()
        if not self.in_flight:
            assert not self.scheduler.has_work, "there is work but no plan"
            return
        if abort is not None:
            self.scheduler.abort(abort)
            self.dropped |= {(abort, index) for index in range(16)}
        plan = self.in_flight.popleft()
        result = self.runner.collect(plan.step)
        outputs = self.fail(plan) if fails else self.scheduler.apply(result)
        for output in outputs:
            self.answers[output.request_id].take(output)
        self.scheduler.check_integrity()
        check_in_flight(self.scheduler, self.runner)

    def launch(self) -> None:
        while len(self.in_flight) < self.depth:
            before = self.scheduler.stats().block_waits
            plan = self.scheduler.plan()
            is_short = self.scheduler.stats().block_waits > before
            if plan is None:
                return
            check_plan(self.scheduler, plan, self.config, is_short=is_short)
            plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
            self.runner.launch(plan)
            self.in_flight.append(plan)
            self.scheduler.check_integrity()
            check_in_flight(self.scheduler, self.runner)

    def fail(self, plan: StepPlan) -> list[SequenceOutput]:
        """A step that fails as a whole: some of its requests may end; the steps behind it are collected and void."""
        while self.in_flight:
            self.runner.collect(self.in_flight.popleft().step)
        outputs = self.scheduler.apply_failure("the device is gone")
        assert self.scheduler.num_in_flight == 0
        ended = {output.request_id for output in outputs}
        self.dropped |= {(request_id, index) for request_id in ended for index in range(16)}
        return outputs

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_work:
                break
            self.step(abort=None)
        assert not self.scheduler.has_work, "a request never finished"
        assert self.cache.num_used == 0 and self.scheduler.stats().running == self.scheduler.stats().waiting == 0
        for request in self.requests.values():
            self.check_answer(request, self.answers[request.request_id])

    def check_answer(self, request: Request, answers: Answers) -> None:
        for index in range(request.params.n):
            if (request.request_id, index) in self.dropped:
                continue
            ending = answers.endings[index]
            if request.request_id in self.failing:
                assert ending.finish_reason == "error" or index > 0, "a failed sequence ended well"
                continue
            assert ending.finish_reason in ("stop", "length"), ending
            if request.pooling is not None:
                history = histories(request.prompt_token_ids, [])[-1]
                assert ending.embedding == [float(history % 1000)]
            elif request.params.beam:
                assert answers.tokens[index] == alone(request)[index]
            else:
                assert answers.tokens[index] == expected_tokens(request, index)
        if (request.request_id, 0) not in self.dropped and request.request_id not in self.failing:
            self.check_prompt_logprobs(request, answers)

    def check_prompt_logprobs(self, request: Request, answers: Answers) -> None:
        if request.params.prompt_logprobs is None or request.pooling is not None:
            assert not answers.prompt_logprobs
            return
        assert answers.prompt_logprobs == [expected_prompt_logprobs(request)]


TestLife = SchedulerMachine.TestCase
TestLife.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
