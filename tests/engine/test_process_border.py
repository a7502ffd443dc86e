"""Scheduler here, runner in another process, two steps in flight: the same tokens as in one process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from tests.support.runner_process import RemoteRunner, RunnerSizes, local_runner
from tokenmill.config import SchedulerConfig
from tokenmill.engine.core import EngineCore, Runner
from tokenmill.engine.status import CoreInfo
from tokenmill.guided.compile import Compiler
from tokenmill.guided.grammars import Grammars
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.kv.cache import KVCache
from tokenmill.params import BeamParams, Guided, SamplingParams
from tokenmill.runner.runner import ModelRunner
from tokenmill.scheduler import Scheduler
from tokenmill.scheduler.request import Sequence, SequenceGroup
from tokenmill.scheduler.speculation import NO_DRAFTS, Drafter, room_for_drafts
from tokenmill.text.tokenizer import byte_tokenizer
from tokenmill.types import Request, RowInit, StepPlan, StepResult

VOCAB, EOS, ROWS = 258, 257, 6
MANY, FEW = RunnerSizes(VOCAB, 400, 4, ROWS, 128), RunnerSizes(VOCAB, 26, 4, ROWS, 128)
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["age"]}
Answers = dict[tuple[str, int], list[int]]
Clock = Callable[[], float]


def draws_alone(new: RowInit) -> bool:
    """A runner that remembers what its rows drew can feed that: the scheduler leaves out beams itself."""
    return new.pooling is None


class KnowingDrafter:
    """Drafts the tokens that a sequence is known to say, some of them wrong."""

    def __init__(self, answers: Answers, grammars: Grammars, seed: int) -> None:
        self._answers = answers
        self._grammars = grammars
        self._random = random.Random(seed)

    def propose(self, groups: Seq[SequenceGroup]) -> dict[Sequence, list[int]]:
        found = {one: self._drafts(group, one) for group in groups for one in group.members}
        return {sequence: drafts for sequence, drafts in found.items() if drafts}

    def _drafts(self, group: SequenceGroup, sequence: Sequence) -> list[int]:
        most = min(room_for_drafts(group, sequence), self._random.randrange(6))
        if not most:
            return []
        answer = self._answers[sequence.state.request.request_id, sequence.index]
        right = answer[sequence.num_outputs : sequence.num_outputs + most]
        drafts = [token if self._random.random() < 0.8 else self._random.randrange(256) for token in right]
        return drafts[: self._grammars.num_allowed(sequence.row, drafts)]

    def note_step(self, plan: StepPlan, result: StepResult) -> None: ...

    def note_end(self, sequence: Sequence) -> None: ...


def requests() -> list[Request]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.9, "n": 3}, {"guided": Guided.schema(SCHEMA)}, {"logprobs": 1},
        {"guided": Guided("regex", r"(ab|cd)+[0-9]{3}\."), "n": 2}, {"beam": BeamParams(3), "n": 2},
        {"temperature": 0.7, "repetition_penalty": 1.2, "stop_token_ids": list(range(40, 60))},
    ]  # fmt: skip
    found = []
    for number in range(21):
        prompt = [3] * (number % 4 * 4) + [10 + (number * 31 + place) % 200 for place in range(number % 11 + 1)]
        found.append(
            Request(
                request_id=f"r{number}", prompt_token_ids=prompt, params=SamplingParams(**kinds[number % len(kinds)]),
                eos_token_ids=[EOS], max_tokens=24, seed=number, priority=number % 2,
            )
        )  # fmt: skip
    return found


def answers(
    runner: Runner, limits: RunnerSizes, known: Answers | None = None, clock: Clock = time.monotonic, seed: int = 4
) -> tuple[Answers, Scheduler]:
    """`known`: what the requests are known to say, to draft from; `seed`: of the drafts that are wrong."""
    grammars = Grammars(Compiler(lambda: Vocabulary(byte_tokenizer(), VOCAB, (EOS,))), ROWS, VOCAB)
    drafter: Drafter = NO_DRAFTS if known is None else KnowingDrafter(known, grammars, seed)
    scheduler = Scheduler(
        config=SchedulerConfig(max_running=ROWS, token_budget=24),
        cache=KVCache(windows=(None,), num_blocks=limits.num_blocks, block_size=limits.block_size),
        max_rows=ROWS,
        clock=clock,
        continues=runner.continues,
        drafter=drafter,
    )
    core = EngineCore(scheduler, runner, CoreInfo(max_context=128, num_blocks=0, block_size=4), grammars=grammars)
    for request in requests():
        core.prepare(request)
        core.add(request)
    said: Answers = {}
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            said.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        scheduler.check_integrity()
    return said, scheduler


@pytest.mark.parametrize("with_drafts", [False, True])
def test_plans_and_results_cross_a_process_border(with_drafts: bool) -> None:
    expected, _ = answers(local_runner(MANY), MANY)
    with RemoteRunner(FEW, depth=2, continues=draws_alone) as runner:
        found, scheduler = answers(runner, FEW, expected if with_drafts else None)
        assert runner.most_in_flight == 2
        assert with_drafts or runner.num_pending_guided > 20, "rows with grammars are in both steps in flight"
    assert found == expected
    stats = scheduler.stats()
    assert stats.preemptions > 0
    if with_drafts:
        assert 0 < stats.accepted_tokens < stats.drafted_tokens


class TwoStepsInFlight(ModelRunner):
    depth = 2

    def continues(self, new: RowInit) -> bool:
        return draws_alone(new)


@pytest.mark.parametrize(("num_blocks", "seed"), [(25, 4), (26, 45)])
def test_beams_of_which_some_find_no_room_lose_no_block(
    num_blocks: int, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A beam that writes into a shared block gets a copy, which must be made even where the next beam has to wait."""
    rng, now = random.Random(seed), 0.0
    expected, _ = answers(local_runner(MANY), MANY)

    def clock() -> float:
        nonlocal now
        now += rng.expovariate(100.0)
        return now

    few = RunnerSizes(VOCAB, num_blocks, 4, ROWS, 128)
    found, _ = answers(local_runner(few, TwoStepsInFlight), few, expected, clock, seed)
    assert found == expected
    assert "failed" not in caplog.text, "every row has found its own tokens in its blocks"
