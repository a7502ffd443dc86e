"""The runner of a scripted model: rows, sampling and masks as for any model, tokens from a script instead of weights.

A row's state says which token the script wants next; the logits put that token far above all others. The others are in
an order too, for the case that a mask forbids it: what closes a string, an object or a section comes first, so that a
grammar which has to bend a stubborn script soon finds an end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from tokenmill.kv.storage import KVStorage
from tokenmill.ops.batch import ForwardBatch, Mode
from tokenmill.runner.runner import ModelRunner, RowSampler, RowsForward
from tokenmill.text.script import FAIL, HIDDEN_SIZE, AnswerCursor, TokenizedScript
from tokenmill.types import RowPlan, StepPlan

UNSCRIPTED = -2.0  # at a position inside the prompt: the script says nothing of it
WANTED_LOGIT = 400.0
LOGIT_STEP = 40.0  # between two ranks: at any usual temperature the better one is certain in a million tokens
ENDING, CONTROL, LAST = 9, 8, -1
RANKS = {'"': 7, "'": 6, "}": 5, "]": 5, ")": 5, ">": 5, "<": 4, "/": 4, ",": 3, ":": 3}
ALPHANUMERIC, ANY = 2, 1


class ScriptModel:
    """Logits from wishes: a state holds the token that is wanted, or none, or a failure."""

    best_logits = direct = adapter_slots = None

    def __init__(self, script: TokenizedScript) -> None:
        self.script = script
        self.vocab_size = script.tokenizer.vocab_size
        ranks = [self._rank(token_id) for token_id in range(self.vocab_size)]
        self._otherwise = torch.tensor(ranks, dtype=torch.float32) * LOGIT_STEP

    def _rank(self, token_id: int) -> float:
        tokenizer = self.script.tokenizer
        if token_id == self.script.eos_token_id:
            return ENDING
        if token_id in tokenizer.special_ids:
            return CONTROL
        text = tokenizer.token_text(token_id)
        if not text or text[0].isspace():
            return LAST
        rank = RANKS.get(text[0], ALPHANUMERIC if text[0].isalnum() else ANY)
        return rank + (0.5 if len(text) == 1 else 0.0)

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        raise NotImplementedError("a script is said row by row, by ScriptRunner")

    def logits(self, hidden: torch.Tensor, mode: Mode = "eager", adapters: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._otherwise.repeat(len(hidden), 1)
        for line, wish in enumerate(hidden[:, 0].tolist()):
            if wish == FAIL:
                logits[line] = float("nan")
            elif wish == UNSCRIPTED:
                logits[line] = 0.0
            else:
                logits[line, int(wish)] = WANTED_LOGIT
        return logits


class ScriptRunner(ModelRunner):
    """Knows for each row its prompt, and so its answer, and what was sampled of it."""

    def __init__(
        self, model: ScriptModel, storage: KVStorage, sampler: RowSampler, max_rows: int, max_context: int
    ) -> None:
        super().__init__(model, storage, sampler, max_rows, max_context)
        self._script = model.script
        self._cursors: dict[int, AnswerCursor] = {}

    def apply_changes(self, plan: StepPlan) -> None:
        super().apply_changes(plan)
        for row in plan.freed_rows:
            self._cursors.pop(row, None)
        for new in plan.new_rows:
            cursor = AnswerCursor(self._script, self._script.answer_to(new.prompt_token_ids))
            cursor.note_sampled(0, new.output_token_ids)
            self._cursors[new.row] = cursor

    def start_rows(self, plans: Sequence[RowPlan]) -> RowsForward:
        tasks = [self._task(plan) for plan in plans]
        time.sleep(max((self._delay_s(plan) for plan in plans), default=0.0))
        states = [state for task in tasks for state in self._states(task.plan, task.wanted)]
        return RowsForward(tasks, torch.tensor(states, dtype=torch.float64).view(-1, HIDDEN_SIZE))

    def _delay_s(self, plan: RowPlan) -> float:
        if not plan.sample:
            return 0.0
        rule = self._cursors[plan.row].answer.rule
        return rule.token_delay_s if plan.output_index else rule.delay_s

    def _states(self, plan: RowPlan, wanted: Sequence[int]) -> list[list[float]]:
        """The states of a row's wanted tokens; `wanted` counts from the first fed one."""
        row, cursor = self.rows[plan.row], self._cursors[plan.row]
        if row.pooler is not None:
            return [_vector(plan.token_ids[offset]) for offset in wanted]
        first = plan.sequence_position - len(row.prompt_token_ids)  # of the fed tokens, counted in the answer
        in_answer = plan.token_ids[max(0, -first) :]
        cursor.note_sampled(max(0, first), in_answer)
        wishes = [cursor.next_token(first + offset + 1) if first + offset >= -1 else UNSCRIPTED for offset in wanted]
        return [[wish] + [0.0] * (HIDDEN_SIZE - 1) for wish in wishes]


def _vector(token_id: int) -> list[float]:
    """Some vector for a token, the same every time, for embeddings."""
    return [((token_id + 1) * (place + 1) * 7919 % 10_007) / 10_007 - 0.5 for place in range(HIDDEN_SIZE)]
