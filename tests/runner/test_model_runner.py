"""A step of the runner: rows, tables, copies, drawing, prompt scores, vectors, and errors that stay in their row."""

from __future__ import annotations

import math

import pytest
import torch

from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import Model
from tokenmill.ops.batch import DrawParams, StepRows
from tokenmill.ops.cpu import is_available
from tokenmill.params import SamplingParams
from tokenmill.runner import runner as model_runner
from tokenmill.runner.runner import ModelRunner
from tokenmill.sampling.sampler import Sampler
from tokenmill.testing.scripted_models import ContextModel, ScriptedModel, count_upwards, follow
from tokenmill.types import BlockTableUpdate, Pooling, RowInit, RowPlan, RowResult, StepPlan, StepResult

VOCAB, BLOCK = 32, 4
CPU = torch.device("cpu")


def make_runner(model: Model, max_rows: int = 4) -> ModelRunner:
    storage = KVStorage(model.layout, 64, BLOCK, CPU)
    return ModelRunner(model, storage, Sampler(VOCAB, max_rows, CPU), max_rows, max_context=64)


def new_row(row: int, prompt: list[int], pooling: Pooling | None = None, temperature: float = 0.0) -> RowInit:
    params = SamplingParams(temperature=temperature)
    return RowInit(
        row=row,
        params=params,
        seed=row,
        prompt_token_ids=prompt,
        output_token_ids=[],
        stop_token_ids=[],
        pooling=pooling,
    )


def tables(blocks: list[int], groups: int = 1) -> list[BlockTableUpdate]:
    return [BlockTableUpdate(group, 0, [block + 20 * group for block in blocks]) for group in range(groups)]


def run(runner: ModelRunner, plan: StepPlan) -> StepResult:
    return runner.collect(runner.launch(plan))


def one(runner: ModelRunner, plan: StepPlan) -> RowResult:
    (result,) = run(runner, plan).rows
    return result


def test_a_prompt_in_chunks_then_tokens_one_by_one() -> None:
    runner = make_runner(ScriptedModel(VOCAB))
    first = RowPlan(row=1, start=0, token_ids=[4, 5, 6], table_updates=tables([9]))
    assert one(runner, StepPlan(new_rows=[new_row(1, [4, 5, 6, 7, 8])], rows=[first])) == RowResult(row=1)
    last = RowPlan(row=1, start=3, token_ids=[7, 8], table_updates=[BlockTableUpdate(0, 1, [3])], sample=True)
    assert one(runner, StepPlan(rows=[last])).token_ids == [9]
    again = RowPlan(row=1, start=5, token_ids=[9], sample=True, output_index=1)
    assert one(runner, StepPlan(rows=[again])).token_ids == [10]


class ChoosingModel:
    """Counts upwards, and has a way to its best tokens that writes no logits down."""

    direct = None

    def __init__(self) -> None:
        self._plain = ScriptedModel(VOCAB, nan_token=3)
        self.vocab_size, self.layout, self.forward = VOCAB, self._plain.layout, self._plain.forward
        self.asked: list[str] = []

    def logits(self, hidden: torch.Tensor, mode: str = "eager") -> torch.Tensor:
        self.asked.append("all")
        return self._plain.logits(hidden)

    def best_logits(self, hidden: torch.Tensor, mode: str = "eager") -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append("best")
        values, tokens = self._plain.logits(hidden).max(dim=-1)
        return tokens, values


def test_all_logits_are_computed_only_where_someone_looks_at_them() -> None:
    model = ChoosingModel()
    runner = make_runner(model)
    fed = [
        RowPlan(row=row, start=0, token_ids=[row], table_updates=tables([row + 1]), sample=True) for row in (1, 2, 3)
    ]
    first = run(runner, StepPlan(new_rows=[new_row(row, [row]) for row in (1, 2, 3)], rows=fed)).rows
    assert [result.token_ids for result in first[:2]] == [[2], [3]]
    assert first[2].error is not None
    drafted = RowPlan(row=1, start=1, token_ids=[2, 3, 9], sample=True, num_drafts=2, output_index=1)
    assert one(runner, StepPlan(rows=[drafted])).token_ids == [3]
    scored = RowPlan(row=2, start=1, token_ids=[5], sample=True, num_logprobs=1, output_index=1)
    assert one(runner, StepPlan(rows=[scored])).token_ids == [6]
    assert model.asked == ["best", "best", "all"]


class DirectScriptedModel(ScriptedModel):
    """Takes rows as they are where they only draw."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.asked: list[tuple[str, list[int], list[int]]] = []

    @property
    def direct(self) -> DirectScriptedModel:  # type: ignore[override]
        return self

    def greedy_next(self, rows: StepRows, storage: KVStorage) -> list[int]:
        return self._after("best", rows).argmax(dim=-1).tolist()

    def draw_next(self, rows: StepRows, params: DrawParams, storage: KVStorage) -> list[int]:
        assert len(params.uniforms) == len(set(params.uniforms)) == sum(rows.num_outputs)
        return self._after("draw", rows).argmax(dim=-1).tolist()

    def logits_next(self, rows: StepRows, storage: KVStorage) -> torch.Tensor:
        return self._after("logits", rows)

    def _after(self, head: str, rows: StepRows) -> torch.Tensor:
        self.asked.append((head, rows.rows, rows.num_outputs))
        states: list[tuple[int, int]] = []
        for start, tokens, num in zip(rows.starts, rows.token_ids, rows.num_outputs, strict=True):
            states += list(enumerate(tokens, start))[len(tokens) - num :]
        return self.logits(torch.tensor(states, dtype=torch.float64).view(-1, 2))


def test_a_model_may_take_the_rows_as_they_are() -> None:
    model = DirectScriptedModel()
    runner = make_runner(model)
    chunk = RowPlan(row=0, start=0, token_ids=[1, 2], table_updates=tables([1]))
    assert one(runner, StepPlan(new_rows=[new_row(0, [1, 2, 3])], rows=[chunk])) == RowResult(row=0)
    rows = [
        RowPlan(row=1, start=0, token_ids=[7], table_updates=tables([2]), sample=True, num_logprobs=0),
        RowPlan(row=2, start=0, token_ids=[9, 9], table_updates=tables([3])),
        RowPlan(row=0, start=2, token_ids=[3, 4, 6], sample=True, num_drafts=2),
    ]
    mixed = run(runner, StepPlan(new_rows=[new_row(1, [7]), new_row(2, [9, 9, 9], temperature=1.0)], rows=rows)).rows
    assert [result.token_ids for result in mixed] == [[8], [], [4, 5]]
    assert mixed[0].logprobs is not None and mixed[0].logprobs[0].token_id == 8
    going_on = [
        RowPlan(row=1, start=1, token_ids=[8], sample=True, output_index=1),
        RowPlan(row=2, start=2, token_ids=[9, 10, 12], sample=True, num_drafts=2),
    ]
    assert [result.token_ids for result in run(runner, StepPlan(rows=going_on)).rows] == [[9], [10, 11]]
    asked = [("best", [0], [0]), ("logits", [1, 2, 0], [1, 0, 3]), ("draw", [1, 2], [1, 3])]
    assert model.asked == (asked if is_available()[0] else [*asked[:2], ("logits", *asked[2][1:])])
    vector = RowPlan(row=3, start=0, token_ids=[5], table_updates=tables([4]))
    beside = RowPlan(row=0, start=4, token_ids=[5], sample=True, output_index=2)
    pooled, drawn = run(runner, StepPlan(new_rows=[new_row(3, [5], Pooling())], rows=[vector, beside])).rows
    assert pooled.embedding is not None and drawn.token_ids == [6]
    assert len(model.asked) == 3


def answers(runner: ModelRunner, prompts: dict[int, list[int]], count: int, groups: int) -> dict[int, list[int]]:
    """Greedy answers of several rows, each prompt in one chunk, all rows in every step."""
    found: dict[int, list[int]] = {row: [] for row in prompts}
    blocks = {row: [1 + 5 * number + i for i in range(5)] for number, row in enumerate(prompts)}
    new_rows = [new_row(row, prompt) for row, prompt in prompts.items()]
    for step in range(count):
        rows = [
            RowPlan(
                row=row,
                start=0 if step == 0 else len(prompt) + step - 1,
                token_ids=prompt if step == 0 else found[row][-1:],
                table_updates=tables(blocks[row], groups) if step == 0 else [],
                sample=True,
                output_index=step,
            )
            for row, prompt in prompts.items()
        ]
        for result in run(runner, StepPlan(new_rows=new_rows if step == 0 else [], rows=rows)).rows:
            found[result.row] += result.token_ids
    return found


def test_rows_together_answer_as_they_do_alone() -> None:
    prompts = {2: [1, 2, 3, 4, 5, 6], 0: [9], 3: [7, 7, 7, 7, 7]}
    windows = (None, 3)
    together = answers(make_runner(ContextModel(VOCAB, windows)), prompts, 8, groups=2)
    for row, prompt in prompts.items():
        assert answers(make_runner(ContextModel(VOCAB, windows)), {row: prompt}, 8, groups=2)[row] == together[row]
    assert len({tuple(tokens) for tokens in together.values()}) == 3


def test_a_row_that_finds_foreign_tokens_is_noticed() -> None:
    runner = make_runner(ContextModel(VOCAB))
    rows = [RowPlan(row=0, start=0, token_ids=[1, 2, 3, 4, 5], table_updates=tables([6, 6]), sample=True)]
    with pytest.raises(AssertionError, match="positions 0 to 4"):
        run(runner, StepPlan(new_rows=[new_row(0, [1, 2, 3, 4, 5])], rows=rows))


def test_copied_blocks_continue_a_fork() -> None:
    runner = make_runner(ContextModel(VOCAB))
    prompt = [3, 1, 4, 1, 5]
    plan = RowPlan(row=0, start=0, token_ids=prompt, table_updates=tables([1, 2]), sample=True)
    drawn = one(runner, StepPlan(new_rows=[new_row(0, prompt)], rows=[plan])).token_ids
    fork = RowPlan(row=1, start=5, token_ids=drawn, table_updates=tables([1, 7]), sample=True, output_index=1)
    parent = RowPlan(row=0, start=5, token_ids=drawn, sample=True, output_index=1)
    results = run(runner, StepPlan(new_rows=[new_row(1, prompt)], copies=[(2, 7)], rows=[parent, fork])).rows
    assert results[0].token_ids == results[1].token_ids


def test_nan_logits_are_the_error_of_their_row_only() -> None:
    runner = make_runner(ScriptedModel(VOCAB, nan_token=13))
    rows = [
        RowPlan(row=row, start=0, token_ids=[token], table_updates=tables([1 + row]), sample=True)
        for row, token in ((0, 5), (1, 13), (2, 7))
    ]
    results = run(runner, StepPlan(new_rows=[new_row(row, [1]) for row in range(3)], rows=rows)).rows
    assert [result.token_ids for result in results] == [[6], [], [8]]
    assert results[1].error is not None and "NaN" in results[1].error
    assert results[0].error is None and results[2].error is None


def expected_score(position: int, prompt: list[int]) -> float:
    logits = count_upwards(VOCAB)(position, prompt[position])
    return float(torch.log_softmax(logits, -1)[prompt[position + 1]])


@pytest.mark.parametrize("chunk", [1, 2, 5, 7])
def test_prompt_scores_do_not_depend_on_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "MAX_HOST_LOGITS", 2 * VOCAB)  # two positions at once
    prompt = [3, 4, 9, 10, 11, 2, 3]
    runner = make_runner(ScriptedModel(VOCAB))
    found, new_rows = [], [new_row(0, prompt)]
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        is_last = start + chunk >= len(prompt)
        plan = RowPlan(
            row=0, start=start, token_ids=part, table_updates=tables([1, 2]), sample=is_last, num_prompt_logprobs=1
        )
        result = one(runner, StepPlan(new_rows=new_rows, rows=[plan]))
        found += result.prompt_logprobs or []
        new_rows = []
    assert result.token_ids == [4]
    assert [score.token_id for score in found] == prompt[1:]
    assert [score.logprob for score in found] == pytest.approx([expected_score(p, prompt) for p in range(6)])
    assert [score.top_ids for score in found] == [[token + 1] for token in prompt[:-1]]


def test_nan_in_a_prompt_score_is_an_error() -> None:
    runner = make_runner(ScriptedModel(VOCAB, nan_token=6))
    plan = RowPlan(row=0, start=0, token_ids=[5, 6, 7], table_updates=tables([1]), sample=True, num_prompt_logprobs=0)
    result = one(runner, StepPlan(new_rows=[new_row(0, [5, 6, 7])], rows=[plan]))
    assert result.error is not None and result.token_ids == []


# The scripted model's hidden state is (position, token).
@pytest.mark.parametrize(("kind", "expected"), [("mean", [2.0, 6.0]), ("last", [4.0, 2.0]), ("cls", [0.0, 10.0])])
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_vectors_are_pooled_across_chunks(kind: str, expected: list[float], chunk: int) -> None:
    prompt = [10, 8, 6, 4, 2]
    runner = make_runner(ScriptedModel(VOCAB))
    new_rows = [new_row(0, prompt, Pooling(kind, normalize=False))]  # type: ignore[arg-type]
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        plan = RowPlan(row=0, start=start, token_ids=part, table_updates=tables([1, 2]))
        result = one(runner, StepPlan(new_rows=new_rows, rows=[plan]))
        assert (result.embedding is None) == (start + chunk < len(prompt))
        new_rows = []
    assert result.embedding == expected
    run(runner, StepPlan(freed_rows=[0]))


def test_normalised_vectors_have_length_one() -> None:
    runner = make_runner(ScriptedModel(VOCAB))
    plan = RowPlan(row=0, start=0, token_ids=[3, 9], table_updates=tables([1]), sample=True)
    result = one(runner, StepPlan(new_rows=[new_row(0, [3, 9], Pooling("mean"))], rows=[plan]))
    assert result.embedding is not None and math.hypot(*result.embedding) == pytest.approx(1.0)


def test_a_freed_row_can_be_taken_again_in_the_same_step() -> None:
    runner = make_runner(ScriptedModel(VOCAB, follow([5, 6, 7, 8], VOCAB)), max_rows=1)
    plan = RowPlan(row=0, start=0, token_ids=[5], table_updates=tables([1]), sample=True)
    assert one(runner, StepPlan(new_rows=[new_row(0, [5])], rows=[plan])).token_ids == [6]
    result = one(runner, StepPlan(freed_rows=[0], new_rows=[new_row(0, [5])], rows=[plan]))
    assert result.token_ids == [6]
    assert run(runner, StepPlan(freed_rows=[0])).rows == []
