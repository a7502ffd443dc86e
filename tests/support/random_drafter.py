"""A proposer that knows which tokens the simulated runner will sample, and proposes wrong ones at random."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from tests.support.simulated_runner import EOS, VOCAB, drawn, histories, in_sight
from tokenmill.scheduler.request import Sequence, SequenceGroup
from tokenmill.scheduler.speculation import room_for_drafts
from tokenmill.types import StepPlan, StepResult

MOST = 6


class RandomDrafter:
    def __init__(self, seed: int, wrong: float = 0.2) -> None:
        self._random = random.Random(seed)
        self._wrong = wrong
        self.num_steps = 0

    def propose(self, groups: Seq[SequenceGroup]) -> dict[Sequence, list[int]]:
        drafts = {sequence: self._guess(group, sequence) for group in groups for sequence in group.members}
        return {sequence: tokens for sequence, tokens in drafts.items() if tokens}

    def _guess(self, group: SequenceGroup, sequence: Sequence) -> list[int]:
        tokens, shift = list(sequence.tokens), sequence.state.request.shift
        for _ in range(min(self._random.randrange(MOST + 1), room_for_drafts(group, sequence))):
            output_index = len(tokens) - sequence.prompt_len
            token = drawn(sequence.seed, output_index, histories(in_sight(tokens, shift), [])[-1])
            params = sequence.state.request.params
            if output_index + 1 < params.min_tokens and token in sequence.state.stop_token_ids:
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
