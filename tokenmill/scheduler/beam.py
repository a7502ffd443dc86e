"""Beam search: keep the `width` best unfinished hypotheses, grow all of them by one token at a time.

    live beams × 2·width most likely tokens ──► the 2·width best sums of logprobs, best first
        ends (stop, length) and ranks among the first `width`      ──► finished, score = sum / length ** penalty
        the first `width` that go on                               ──► the next live beams

Twice the width is looked at because up to `width` of them may end. The search is over when `width` hypotheses are
finished and the best live beam, scored at its present length, can't beat the worst of them (with early stopping: as
soon as `width` are finished). These are transformers' rules. Choosing is here; forking is the floor's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tokenmill.scheduler.beam_stops import BeamStops
from tokenmill.scheduler.finish import Ending, ending_after
from tokenmill.scheduler.outputs import failure, whole_output
from tokenmill.scheduler.request_state import RequestState
from tokenmill.scheduler.sequence import Sequence
from tokenmill.types import RowResult, SequenceOutput, TokenLogprobs


class Branch(NamedTuple):
    """A live beam's continuation by one token."""

    parent: Sequence
    token: TokenLogprobs
    logprob_sum: float

    def grow(self, sequence: Sequence, *, keep_logprobs: bool) -> None:
        sequence.append(self.token.token_id)
        sequence.logprob_sum = self.logprob_sum
        if keep_logprobs:
            sequence.logprobs.append(self.token)


class Hypothesis(NamedTuple):
    score: float
    sequence: Sequence
    ending: Ending


class BeamSearch:
    holds_back = True

    def __init__(self, state: RequestState) -> None:
        params = state.request.params
        assert params.beam is not None
        self._job = state
        self._beam = params.beam
        self._stops = BeamStops(state.request)
        self.num_logprobs: int | None = max(2 * params.beam.width, params.logprobs or 0)
        self._reports: dict[Sequence, RowResult] = {}
        self._finished: list[Hypothesis] = []
        self._branches: list[Branch] = []

    def take(self, sequence: Sequence, result: RowResult) -> list[SequenceOutput]:
        """Waits until all live beams have reported, then chooses."""
        if self._job.request.max_tokens == 0:
            self._finished = [self._finish(0.0, sequence, Ending("length"), 1)] * self._beam.width
            return self._end()
        self._reports[sequence] = result
        group = sequence.group
        assert group is not None
        if group.pending_forks or not all(self._has_reported(member) for member in group.members):
            return []
        branches = self._choose(self._ranked(group.members))
        if self._is_over(branches):
            return self._end()
        self._branches = branches
        return []

    def _has_reported(self, sequence: Sequence) -> bool:
        """A report from before a preemption doesn't count: the sequence is being computed again."""
        return sequence in self._reports and sequence.computed == len(sequence.window)

    def next_beams(self) -> list[tuple[Branch, bool]]:
        """Hands over the chosen branches (none: not decided yet), each with: the runner drew that very token."""
        chosen = [(branch, self._was_drawn(branch)) for branch in self._branches]
        if chosen:
            self._branches, self._reports = [], {}
        return chosen

    def _was_drawn(self, branch: Branch) -> bool:
        return self._reports[branch.parent].token_ids == [branch.token.token_id]

    # ── choosing ───────────────────────────────────────────────────────────────────────────────────────

    def _ranked(self, members: list[Sequence]) -> list[Branch]:
        branches = [branch for member in members for branch in self._continuations(member)]
        branches.sort(key=lambda branch: -branch.logprob_sum)
        return branches[: 2 * self._beam.width]

    def _continuations(self, sequence: Sequence) -> list[Branch]:
        logprobs = self._reports[sequence].logprobs
        if not logprobs:
            return []
        top = logprobs[0]
        return [
            Branch(sequence, self._as_chosen(top, rank), sequence.logprob_sum + logprob)
            for rank, (token_id, logprob) in enumerate(zip(top.top_ids, top.top_logprobs, strict=True))
            if math.isfinite(logprob) and not self._is_held_back(sequence, token_id)
        ]

    def _as_chosen(self, top: TokenLogprobs, rank: int) -> TokenLogprobs:
        shown = self._job.request.params.logprobs or 0
        return TokenLogprobs(
            top.top_ids[rank], top.top_logprobs[rank], rank + 1, top.top_ids[:shown], top.top_logprobs[:shown]
        )

    def _is_held_back(self, sequence: Sequence, token_id: int) -> bool:
        params = self._job.request.params
        too_early = sequence.num_outputs + 1 < params.min_tokens
        # a grammar that is over can only end; its masks say so
        return too_early and params.guided is None and token_id in self._job.stop_token_ids

    def _choose(self, ranked: list[Branch]) -> list[Branch]:
        """Files the hypotheses that end, returns those that go on."""
        endings = [self._ending(branch) for branch in ranked]
        going_on = [branch for branch, ending in zip(ranked, endings, strict=True) if ending is None]
        # Lower ranks are only there to have enough that go on; where none does, they are better than nothing.
        num_eligible = self._beam.width if going_on else len(ranked)
        for branch, ending in zip(ranked[:num_eligible], endings, strict=False):
            if ending is not None:
                self._file(branch, ending)
        return going_on[: self._beam.width]

    def _ending(self, branch: Branch) -> Ending | None:
        length = branch.parent.num_outputs + 1
        token_id = branch.token.token_id
        ending = ending_after(self._job.request, self._job.stop_token_ids, token_id, length)
        if ending is None and self._stops.is_met(branch.parent.outputs, token_id):
            return Ending("stop")
        return ending

    def _file(self, branch: Branch, ending: Ending) -> None:
        length = branch.parent.num_outputs + 1
        ended = branch.parent.fork()
        branch.grow(ended, keep_logprobs=self._job.request.params.logprobs is not None)
        self._finished.append(self._finish(branch.logprob_sum, ended, ending, length))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self._beam.width :]

    def _finish(self, logprob_sum: float, sequence: Sequence, ending: Ending, length: int) -> Hypothesis:
        return Hypothesis(logprob_sum / length**self._beam.length_penalty, sequence, ending)

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────

    def _is_over(self, branches: list[Branch]) -> bool:
        if not branches:
            return True
        if len(self._finished) < self._beam.width:
            return False
        length = branches[0].parent.num_outputs + 1
        best_live = branches[0].logprob_sum / length**self._beam.length_penalty
        return self._beam.early_stopping or best_live <= self._finished[-1].score

    def _end(self) -> list[SequenceOutput]:
        for group in self._job.groups:
            for sequence in [*group.members, *group.pending_forks]:
                sequence.is_finished = True
        num_asked = self._job.request.params.n
        best = self._finished[:num_asked]
        missing = [failure(self._job, i, "beam search found no hypothesis") for i in range(len(best), num_asked)]
        return missing + [
            whole_output(self._job, i, hypothesis.sequence, hypothesis.ending) for i, hypothesis in enumerate(best)
        ]
