"""Beam search: keep the `width` best unfinished hypotheses and extend all of them by one token at a time.

    live beams × 2·width most likely tokens ──► the 2·width best sums of logprobs, best first
        ends (stop, length) and ranks among the first `width`      ──► finished, score = sum / length ** penalty
        the first `width` that continue                            ──► the next live beams

Twice the width is considered because up to `width` of them may end. The search ends when `width` hypotheses are
finished and the best live beam, scored at its present length, can't beat the worst of them (with early stopping: as
soon as `width` are finished). These are the rules of Hugging Face transformers. The choice is made here, the forks in
the running set.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tokenmill.scheduler.outputs import failure, whole_output
from tokenmill.scheduler.request import Ending, RequestState, Sequence, ending_after
from tokenmill.types import Request, RowResult, SequenceOutput, TokenLogprobs


class Branch(NamedTuple):
    """The continuation of a live beam by one token."""

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
    """The output mode of a beam search: collects the results of all beams, then chooses the next ones."""

    holds_back = True

    def __init__(self, state: RequestState) -> None:
        params = state.request.params
        assert params.beam is not None
        self._state = state
        self._beam = params.beam
        self._stops = BeamStops(state.request)
        self.num_logprobs: int | None = max(2 * params.beam.width, params.logprobs or 0)
        self._results: dict[Sequence, RowResult] = {}
        self._finished: list[Hypothesis] = []
        self._branches: list[Branch] = []

    def process(self, sequence: Sequence, result: RowResult) -> list[SequenceOutput]:
        """Collect the results of all live beams, then choose the next ones."""
        if self._state.request.max_tokens == 0:
            self._finished = [self._finish(0.0, sequence, Ending("length"), 1)] * self._beam.width
            return self._end()
        self._results[sequence] = result
        group = sequence.group
        assert group is not None
        if group.pending_forks or not all(self._has_result(member) for member in group.members):
            return []
        branches = self._choose(self._ranked(group.members))
        if self._is_over(branches):
            return self._end()
        self._branches = branches
        return []

    def _has_result(self, sequence: Sequence) -> bool:
        """Tell whether a beam has a result; one from before a preemption does not count."""
        return sequence in self._results and sequence.computed == len(sequence.window)

    def next_beams(self) -> list[tuple[Branch, bool]]:
        """Return the chosen branches once (none: not decided yet), each with whether the runner sampled that token."""
        chosen = [(branch, self._was_drawn(branch)) for branch in self._branches]
        if chosen:
            self._branches, self._results = [], {}
        return chosen

    def _was_drawn(self, branch: Branch) -> bool:
        return self._results[branch.parent].token_ids == [branch.token.token_id]

    # ── choosing ───────────────────────────────────────────────────────────────────────────────────────

    def _ranked(self, members: list[Sequence]) -> list[Branch]:
        branches = [branch for member in members for branch in self._continuations(member)]
        branches.sort(key=lambda branch: -branch.logprob_sum)
        return branches[: 2 * self._beam.width]

    def _continuations(self, sequence: Sequence) -> list[Branch]:
        logprobs = self._results[sequence].logprobs
        if not logprobs:
            return []
        top = logprobs[0]
        return [
            Branch(sequence, self._as_chosen(top, rank), sequence.logprob_sum + logprob)
            for rank, (token_id, logprob) in enumerate(zip(top.top_ids, top.top_logprobs, strict=True))
            if math.isfinite(logprob) and not self._is_early_stop(sequence, token_id)
        ]

    def _as_chosen(self, top: TokenLogprobs, rank: int) -> TokenLogprobs:
        shown = self._state.request.params.logprobs or 0
        return TokenLogprobs(
            top.top_ids[rank], top.top_logprobs[rank], rank + 1, top.top_ids[:shown], top.top_logprobs[:shown]
        )

    def _is_early_stop(self, sequence: Sequence, token_id: int) -> bool:
        """Tell whether a token would stop a beam before `min_tokens`."""
        params = self._state.request.params
        too_early = sequence.num_outputs + 1 < params.min_tokens
        # A completed grammar may always end: its masks allow nothing else.
        return too_early and params.guided is None and token_id in self._state.stop_token_ids

    def _choose(self, ranked: list[Branch]) -> list[Branch]:
        """Keep the hypotheses that end; return the branches that continue."""
        endings = [self._ending(branch) for branch in ranked]
        continuing = [branch for branch, ending in zip(ranked, endings, strict=True) if ending is None]
        # Ranks beyond the width only serve to have enough that continue; if none continues, they are used too.
        num_eligible = self._beam.width if continuing else len(ranked)
        for branch, ending in zip(ranked[:num_eligible], endings, strict=False):
            if ending is not None:
                self._add_finished(branch, ending)
        return continuing[: self._beam.width]

    def _ending(self, branch: Branch) -> Ending | None:
        length = branch.parent.num_outputs + 1
        token_id = branch.token.token_id
        ending = ending_after(self._state.request, self._state.stop_token_ids, token_id, length)
        if ending is None and self._stops.is_met(branch.parent.outputs, token_id):
            return Ending("stop")
        return ending

    def _add_finished(self, branch: Branch, ending: Ending) -> None:
        length = branch.parent.num_outputs + 1
        ended = branch.parent.fork()
        branch.grow(ended, keep_logprobs=self._state.request.params.logprobs is not None)
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
        for group in self._state.groups:
            for sequence in [*group.members, *group.pending_forks]:
                sequence.is_finished = True
        num_returned = self._state.request.params.n
        best = self._finished[:num_returned]
        missing = [failure(self._state, i, "beam search found no hypothesis") for i in range(len(best), num_returned)]
        return missing + [
            whole_output(self._state, i, hypothesis.sequence, hypothesis.ending) for i, hypothesis in enumerate(best)
        ]


class BeamStops:
    """Detects stop strings in beams, because the core ranks whole hypotheses and must know when one ends.

    The core has no tokenizer: the front sends the bytes of the tokens that may be part of a stop string; any other
    token can't be part of a match. The front still truncates the text and reports the stop string.
    """

    def __init__(self, request: Request) -> None:
        self._stops = [stop.encode("utf-8", "replace") for stop in request.params.stop]
        self._longest = max(map(len, self._stops), default=0)
        self._pieces = request.tokenized.stop_pieces
        self._min_tokens = request.params.min_tokens

    def is_met(self, outputs: list[int], token_id: int) -> bool:
        """Tell whether the token, after these outputs, completes a stop string after the first `min_tokens`."""
        if not self._stops or token_id not in self._pieces or len(outputs) < self._min_tokens:
            return False
        text = self._pieces[token_id]
        num_needed = len(text) + self._longest - 1
        for token in reversed(outputs[self._min_tokens :]):
            if len(text) >= num_needed or token not in self._pieces:
                break
            text = self._pieces[token] + text
        return any(stop in text for stop in self._stops)
