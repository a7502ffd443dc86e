"""The CUDA runner behind a core with two steps in flight: the same tokens as one step at a time on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.support.eager_device import CPU, eager_runner
from tokenmill.config import SchedulerConfig
from tokenmill.engine.core import EngineCore, Runner
from tokenmill.engine.status import CoreInfo
from tokenmill.guided.compile import Compiler
from tokenmill.guided.grammars import Grammars
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.kv.cache import KVCache
from tokenmill.kv.storage import KVStorage
from tokenmill.params import Guided, SamplingParams
from tokenmill.runner.runner import ModelRunner
from tokenmill.sampling.sampler import Sampler
from tokenmill.scheduler import Scheduler
from tokenmill.testing.scripted_models import ContextModel
from tokenmill.text.tokenizer import byte_tokenizer
from tokenmill.types import PENDING, ContextShift, Pooling, Request, SequenceOutput, StepPlan

VOCAB, BLOCK, ROWS, CONTEXT = 64, 4, 6, 96
BYTES, EOS = 258, 257
INFO = CoreInfo(max_context=CONTEXT, num_blocks=0, block_size=BLOCK)


def core_over(
    make_runner: Any, num_blocks: int, windows: tuple[int | None, ...] = (None,), vocab: int = VOCAB
) -> tuple[EngineCore, Scheduler]:
    model = ContextModel(vocab, windows)
    storage = KVStorage(model.layout, num_blocks, BLOCK, CPU)
    runner: Runner = make_runner(model, storage, Sampler(vocab, ROWS, CPU), ROWS, CONTEXT)
    cache = KVCache(windows=windows, num_blocks=num_blocks, block_size=BLOCK)
    config = SchedulerConfig(max_running=ROWS, token_budget=24)
    scheduler = Scheduler(config=config, cache=cache, max_rows=ROWS, clock=time.monotonic, continues=runner.continues)
    grammars = Grammars(Compiler(lambda: Vocabulary(byte_tokenizer(), BYTES, (EOS,))), ROWS, BYTES)
    return EngineCore(scheduler, runner, INFO, grammars=grammars), scheduler


def requests() -> list[Request]:
    """Every way through the runner: greedy on the device; logprobs, scored prompts, vectors and rare parameters on the
    host; samples of one prompt; contexts that shift; answers that end by a stop token while the next step runs."""
    kinds: list[dict[str, Any]] = [
        {}, {"stop_token_ids": list(range(20, 30))}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"n": 3},
        {"typical_p": 0.8, "temperature": 0.7}, {"logprobs": 0, "prompt_logprobs": 0},
    ]  # fmt: skip
    found = []
    for number in range(28):
        params = SamplingParams(**{"temperature": 0.0, **kinds[number % len(kinds)]})
        prompt = [1 + number % 3] * (number % 9) + [5 + (number * 7 + place) % 50 for place in range(number % 13 + 1)]
        shift = ContextShift(24, 2, 8) if number % 5 == 4 and params.n == 1 else None
        found.append(
            Request(
                request_id=str(number), prompt_token_ids=prompt, params=params, max_tokens=30, seed=number, shift=shift,
                pooling=Pooling() if number == 13 else None, priority=number % 2,
            )
        )  # fmt: skip
    return found


Answers = dict[tuple[str, int], list[Any]]


def answers(
    core: EngineCore,
    scheduler: Scheduler,
    aborted: set[str] = frozenset(),  # type: ignore[assignment]
    asked: Callable[[], list[Request]] = requests,
) -> Answers:
    for request in asked():
        core.prepare(request)
        core.add(request)
    found: Answers = {}
    outputs: list[SequenceOutput] = []
    steps = 0
    while core.has_work:
        outputs = core.step()
        scheduler.check_integrity()
        steps += 1
        if steps == 7:
            for name in aborted:
                core.abort(name)
        for output in outputs:
            said = found.setdefault((output.request_id, output.index), [])
            said += [*output.token_ids, *(output.logprobs or ()), *(output.prompt_logprobs or ())]
            said += [output.finish_reason] if output.finish_reason else []
            said += [round(value, 5) for value in output.embedding or ()]
            assert output.error is None, output.error
    return {key: said for key, said in found.items() if key[0] not in aborted}


def guided_requests() -> list[Request]:
    """Rows with grammars beside others: drawn on the device, with forced tokens between; those that the host draws for
    (penalties, logprobs, a scored prompt); samples of one prompt; contexts that shift."""
    forms = [
        Guided("regex", r"(ab|cd)+[0-9]{3}\."),
        None,
        Guided("regex", r"[a-z]{40}"),
        Guided.schema({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}),
        Guided("regex", r"(yes|no), because [a-z ]{3,9}\."),
    ]
    kinds: list[dict[str, Any]] = [
        {},
        {},
        {"n": 2},
        {},
        {"repetition_penalty": 1.3},
        {"logprobs": 1},
        {"min_tokens": 3},
    ]
    kinds.append({"prompt_logprobs": 0})
    found = []
    for number in range(30):
        params = SamplingParams(temperature=0.0, guided=forms[number % 5], **kinds[number % len(kinds)])
        prompt = [1 + (number * 7 + place) % 50 for place in range(number % 13 + 1)]
        shift = ContextShift(24, 2, 8) if number % 7 == 3 and params.n == 1 else None
        found.append(
            Request(
                request_id=str(number), prompt_token_ids=prompt, params=params, max_tokens=32, seed=number, shift=shift,
                eos_token_ids=[EOS], priority=number % 2,
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("num_blocks", [200, 40])
def test_rows_with_grammars_are_in_every_step(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core, scheduler = core_over(eager_runner(monkeypatch), num_blocks, vocab=BYTES)
    runner: Any = core.runner
    pending = 0

    def counting_launch(plan: StepPlan) -> int:
        nonlocal pending
        ticket = launch(plan)
        pending += sum(row.token_ids == [PENDING] and runner._is_guided[row.row] for row in plan.rows)
        return ticket

    launch, runner.launch = runner.launch, counting_launch
    found = answers(core, scheduler, asked=guided_requests)
    expected = answers(*core_over(ModelRunner, 400, vocab=BYTES), asked=guided_requests)
    assert found == expected
    assert pending > 150, "rows with grammars feed tokens that the host has not seen"
    assert num_blocks > 40 or scheduler.stats().preemptions > 0


@pytest.mark.parametrize(("num_blocks", "windows"), [(200, (None,)), (40, (None,)), (60, (None, 9))])
def test_two_steps_in_flight_say_the_same(
    num_blocks: int, windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, scheduler = core_over(eager_runner(monkeypatch), num_blocks, windows)
    found = answers(core, scheduler)
    assert found == answers(*core_over(ModelRunner, 400, windows))
    graphs: Any = core.runner._graphs  # type: ignore[attr-defined]
    assert graphs.num_pending > graphs.num_given, "most tokens are fed before the host has seen them"
    if num_blocks == 40:
        assert scheduler.stats().preemptions > 0


def test_the_first_token_waits_for_no_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for those of later steps takes as long as several steps do."""
    core, _ = core_over(eager_runner(monkeypatch), 200)
    runner: Any = core.runner
    asked: list[int] = []
    runner._warm_up.compile_rest = lambda: asked.append(1)
    core.add(requests()[0])
    assert not asked and any(output.token_ids for output in core.step()) and not asked
    core.step()
    assert asked


def test_rows_that_decode_beside_a_prompt_are_in_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are read once in such a step, and the newest tokens are known to the device alone."""
    core, scheduler = core_over(eager_runner(monkeypatch), 200)
    runner: Any = core.runner
    passes: list[tuple[int, int]] = []
    mixed_steps = 0

    def forward(batch: Any, storage: Any) -> torch.Tensor:
        passes.append((batch.num_single, len(batch.context_lens)))
        return compute(batch, storage)

    def launch(plan: StepPlan) -> int:
        nonlocal mixed_steps
        passes.clear()
        ticket = launch_step(plan)
        is_mixed = len({len(row.token_ids) > 1 for row in plan.rows}) == 2
        mixed_steps += is_mixed
        if is_mixed:
            assert passes == [(sum(len(row.token_ids) == 1 for row in plan.rows), len(plan.rows))]
        return ticket

    compute, runner._model.forward = runner._model.forward, forward
    launch_step, runner.launch = runner.launch, launch
    asked = [one for one in requests() if self_drawn(one)]
    found = answers(core, scheduler, asked=lambda: asked)
    assert found == answers(*core_over(ModelRunner, 400), asked=lambda: asked)
    assert mixed_steps > 3


def test_a_step_is_collected_when_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no row draws: chunks of prompts, of rows that the device draws for and of those that the host does.
    The scheduler learns from a step's time what chunks cost."""
    core, scheduler = core_over(eager_runner(monkeypatch), 200)
    runner: Any = core.runner
    silent: dict[int, list[Any]] = {}  # events of the steps that draw nothing

    def event() -> Any:
        recorded.append(record())
        return recorded[-1]

    def launch(plan: StepPlan) -> int:
        nonlocal recorded
        recorded = []
        if not any(row.sample for row in plan.rows):
            silent[plan.step] = recorded
        return launch_step(plan)

    def collect(ticket: int) -> Any:
        found = collect_step(ticket)
        assert ticket not in silent or [one.num_waits for one in silent[ticket]] == [1]
        return found

    recorded: list[Any] = []
    record, runner._event = runner._event, event
    launch_step, runner.launch = runner.launch, launch
    collect_step, runner.collect = runner.collect, collect
    kinds = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logprobs=1)]
    for number, params in enumerate(kinds):  # one after the other: a step of one kind alone
        prompt = [1 + (number * 7 + place) % 50 for place in range(90)]
        one = Request(request_id=str(number), prompt_token_ids=prompt, params=params, max_tokens=3, seed=1)
        before = len(silent)
        answers(core, scheduler, asked=lambda one=one: [one])  # type: ignore[misc]
        assert len(silent) - before > 1


def self_drawn(request: Request) -> bool:
    """Tell whether the device draws for a request."""
    params = request.params
    is_scored = params.logprobs is not None or params.prompt_logprobs is not None
    return not is_scored and params.temperature == 0.0 and request.pooling is None


def test_aborted_while_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = {"0", "1", "4", "5"}
    found = answers(*core_over(eager_runner(monkeypatch), 60), aborted)
    assert found == {k: v for k, v in answers(*core_over(ModelRunner, 400)).items() if k[0] not in aborted}


@pytest.mark.failing_steps
def test_a_step_that_fails_once_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of the failed step, and those that came in with the step behind it, are computed again and say what
    they would have said."""
    runner_type = eager_runner(monkeypatch)
    collect, num_collected = runner_type.collect, 0

    def failing(self: Any, ticket: int) -> Any:
        nonlocal num_collected
        num_collected += 1
        result = collect(self, ticket)
        if num_collected == 3:
            raise RuntimeError("the device is gone")
        return result

    monkeypatch.setattr(runner_type, "collect", failing)
    core, scheduler = core_over(runner_type, 200)
    for request in requests():
        core.add(request)
    said: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            assert output.error is None
            if output.index == 0:
                said.setdefault(output.request_id, []).extend(output.token_ids)
        scheduler.check_integrity()
    assert num_collected > 3 and len(said) == len(requests())
    expected = answers(*core_over(ModelRunner, 400))
    for name in said:
        tokens = [one for one in expected[(name, 0)] if isinstance(one, int)]
        assert said[name] == tokens


def test_results_that_are_not_finite_end_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ContextModel(VOCAB, nan_token=63)
    storage = KVStorage(model.layout, 100, BLOCK, CPU)
    runner = eager_runner(monkeypatch)(model, storage, Sampler(VOCAB, ROWS, torch.device("cpu")), ROWS, CONTEXT)
    cache = KVCache(windows=(None,), num_blocks=100, block_size=BLOCK)
    scheduler = Scheduler(
        config=SchedulerConfig(max_running=ROWS, token_budget=24), cache=cache, max_rows=ROWS, clock=time.monotonic,
        continues=runner.continues,
    )  # fmt: skip
    core = EngineCore(scheduler, runner, INFO)
    for name, prompt in (("good", [5, 6, 7]), ("bad", [5, 63, 7])):
        params = SamplingParams(temperature=0.0)
        core.add(Request(request_id=name, prompt_token_ids=prompt, params=params, max_tokens=2, seed=1))
    endings = {}
    while core.has_work:
        endings |= {one.request_id: one.error for one in core.step() if one.finish_reason}
    assert endings["good"] is None and "NaN" in str(endings["bad"])
