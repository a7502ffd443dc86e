"""A drafter that knows what the simulated runner will draw, and lies at random."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from simulated_runner import EOS, VOCAB, drawn, histories, in_sight

from tokenmill.scheduler.drafting import room_for_drafts
from tokenmill.scheduler.job import Gang
from tokenmill.scheduler.sequence import Sequence
from tokenmill.types import StepPlan, StepResult

MOST = 6


class RandomDrafter:
    def __init__(self, seed: int, wrong: float = 0.2) -> None:
        self._random = random.Random(seed)
        self._wrong = wrong
        self.num_steps = 0

    def propose(self, gangs: Seq[Gang]) -> dict[Sequence, list[int]]:
        drafts = {sequence: self._guess(gang, sequence) for gang in gangs for sequence in gang.members}
        return {sequence: tokens for sequence, tokens in drafts.items() if tokens}

    def _guess(self, gang: Gang, sequence: Sequence) -> list[int]:
        tokens, shift = list(sequence.tokens), sequence.job.request.shift
        for _ in range(min(self._random.randrange(MOST + 1), room_for_drafts(gang, sequence))):
            output_index = len(tokens) - sequence.prompt_len
            token = drawn(sequence.seed, output_index, histories(in_sight(tokens, shift), [])[-1])
            params = sequence.job.request.params
            if output_index + 1 < params.min_tokens and token in sequence.job.stop_token_ids:
                token = 1 + EOS
            if self._random.random() < self._wrong:
                token = self._random.randrange(VOCAB)
            tokens.append(token)
        return tokens[len(sequence.tokens) :]

    def note_step(self, plan: StepPlan, result: StepResult) -> None:
        assert len(plan.rows) == len(result.rows)
        self.num_steps += 1

    def note_end(self, sequence: Sequence) -> None:
        assert sequence.is_finished
