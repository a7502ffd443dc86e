"""The batched sampler: logits in, one sampled token per row out.

A row's token is a pure function of its own logits, parameters, history, seed and output index, and independent of the
other rows (see `fixed_point` and `rng`). A row with NaN or infinite logits gets an error; the others are not affected.

    sampler.add_row(new_row)        take a row, or retake it: replaces all its state (resume, fork, beam reorder)
    sampler.observe(plans)          add the fed tokens that were not sampled here to their row's history
    sampler.sample(logits, plans)   sample, and record each token in its row's history
    sampler.verify(logits, plans)   the same where rows may carry draft tokens
    sampler.needs_logits(plans)     whether the rows need more than the argmax of their logits
    sampler.plain_draws(plans)      parameters with which the model itself can sample the rows, if it can
    sampler.free_row(row)           release a row

Verification of draft tokens: each position is sampled as it would be without drafts, with its own random number; a
draft token is accepted if it equals the sampled token. So drafts change no token, sampled or greedy, whatever the
parameters; rejection sampling, as in the literature, preserves only the distribution.

    fed           t  a  b  c           drafts a b c
    logits row    0  1  2  3           logits after t, after a, after b, after c
    sampled       a  b  x  (y)         a and b are accepted; x is the next token; y is discarded

A row whose tokens do not depend on earlier ones samples all its positions at once. Where they do (penalties and the
like), position i + 1 is sampled after position i: in waves, each with one position of every such row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from tokenmill.guided.masks import StepMasks
from tokenmill.ops.batch import DrawParams
from tokenmill.sampling.fixed_point import aligned_rows, draw, to_fixed_probs
from tokenmill.sampling.logprobs import token_logprobs
from tokenmill.sampling.rng import DRAW
from tokenmill.sampling.rows import RowsInUse, RowState, SamplerRows
from tokenmill.sampling.samples import (
    BROKEN,
    HeadOutput,
    ModelSampled,
    NativeDraws,
    Sample,
    argmax_rows,
    draw_params,
    greedy_tokens,
)
from tokenmill.sampling.steps import LOGITS_STEPS, PROBS_STEPS, run_steps, steps_used
from tokenmill.types import RowInit, RowPlan, TokenLogprobs


class Verification:
    """Verification of one row's drafts: a plan per position, and the tokens accepted so far."""

    def __init__(self, plan: RowPlan, state: RowState) -> None:
        self._state = state
        self._drafts = plan.token_ids[len(plan.token_ids) - plan.num_drafts :]
        self.position_plans = [_after(plan, count) for count in range(plan.num_drafts + 1)] if self._drafts else [plan]
        self.accepted: list[Sample] = []
        self._is_active = True
        self._wave_size = 0

    def next_positions(self) -> range:
        """Return the positions of this row that are sampled in the next wave."""
        done = len(self.accepted)
        end = done + 1 if self._state.has_history else len(self.position_plans)
        wave = range(done, end if self._is_active else done)
        self._wave_size = len(wave)
        return wave

    def take(self, drawn: Iterator[Sample]) -> None:
        """Take the samples of the positions of the last wave, and keep them up to the first draft that differs."""
        for one in [next(drawn) for _ in range(self._wave_size)]:
            if self._is_active:
                self._accept(one)

    def _accept(self, one: Sample) -> None:
        position = len(self.accepted)
        if one.error is not None and position:
            self._is_active = False  # the next step samples this position first, and reports the error
            return
        self.accepted.append(one)
        if one.error is None:
            self._state.record(one.token_id, one.mirostat_mu)
        self._is_active = position < len(self._drafts) and one.token_id == self._drafts[position] and one.error is None


def accepted_of(
    plans: Sequence[RowPlan], tokens: Sequence[int], make_sample: Callable[[RowPlan, int], Sample]
) -> list[list[Sample]]:
    """Accept drafts where all positions are sampled already: `tokens`, one per position, of all plans in order."""
    found: list[list[Sample]] = []
    first = 0
    for plan in plans:
        accepted = [make_sample(plan, tokens[first])]
        for position, draft in enumerate(plan.token_ids[len(plan.token_ids) - plan.num_drafts :], 1):
            if tokens[first + position - 1] != draft:
                break
            following = make_sample(plan, tokens[first + position])
            if following.error is not None:
                break  # the next step samples this position first
            accepted.append(following)
        found.append(accepted)
        first += 1 + plan.num_drafts
    return found


def next_logits_rows(verifications: Sequence[Verification]) -> list[int]:
    """Return the logits rows to sample in the next wave, counted over all rows; empty when all are verified."""
    logits_rows: list[int] = []
    first = 0
    for verification in verifications:
        logits_rows += [first + position for position in verification.next_positions()]
        first += len(verification.position_plans)
    return logits_rows


def _after(plan: RowPlan, count: int) -> RowPlan:
    """Return the plan as it would be with only the first `count` drafts, all of them accepted."""
    return msgspec.structs.replace(plan, output_index=plan.output_index + count, num_drafts=count)


Alternatives = Callable[[Tensor, list[int], list[int], RowsInUse], list[TokenLogprobs]]

_EMPTY = -2  # every token was excluded

_ERRORS = {
    BROKEN: "the model computed NaN or infinite logits for this sequence",
    _EMPTY: "no token is left to sample: allowed_token_ids, banned_token_ids, min_tokens, no_repeat_ngram_size, logits "
    "processors and the grammar together exclude every token",
}


class Sampler:
    """Samples for the permanent rows of one runner."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._rows = SamplerRows(vocab_size, max_rows, torch.device(device))
        self._native = NativeDraws(self._rows.device)

    def add_row(self, new_row: RowInit) -> None:
        self._rows.take(new_row, steps_used(new_row.params))

    def free_row(self, row: int) -> None:
        self._rows.free(row)

    def observe(self, rows: Sequence[RowPlan]) -> None:
        """Add the tokens that this step feeds to the rows' histories; called before `sample`."""
        self._rows.observe(rows)

    def needs_logits(self, rows: Sequence[RowPlan]) -> bool:
        """Return whether these rows need more than the token with the highest logit."""
        return not all(plan.num_logprobs is None and self._rows.state(plan.row).takes_highest for plan in rows)

    def plain_draws(self, rows: Sequence[RowPlan]) -> DrawParams | None:
        """Return the parameters of all positions of these rows if a kernel can sample them, else None."""
        states: list[RowState] = []
        indices: list[int] = []
        for plan in rows:
            state = self._rows.state(plan.row)
            if plan.num_logprobs is not None or not self._native.can_draw(state):
                return None
            states += [state] * (1 + plan.num_drafts)
            indices += range(plan.output_index, plan.output_index + 1 + plan.num_drafts)
        return draw_params(states, indices)

    def sample(self, logits: HeadOutput, rows: list[RowPlan], masks: StepMasks | None = None) -> list[Sample]:
        """Sample from logits float32 [S, vocab], row i for rows[i]; the logits stay unchanged.

        `masks`: tokens that the grammars of rows with `params.guided` allow.
        """
        if isinstance(logits, ModelSampled):  # rows that a model samples have no history
            return [self._model_sample(plan, token) for plan, token in zip(rows, logits.tokens, strict=True)]
        self._check(logits, len(rows))
        with torch.inference_mode():
            drawn = self._draw(logits, rows, masks)
        for plan, one in zip(rows, drawn, strict=True):
            if one.error is None:
                self._rows.state(plan.row).record(one.token_id, one.mirostat_mu)
        return drawn

    def verify(self, logits: HeadOutput, rows: list[RowPlan], masks: StepMasks | None = None) -> list[list[Sample]]:
        """Sample after the last token of each row and after each of its drafts, as far as the drafts are accepted.

        logits float32 [S, vocab]: 1 + num_drafts logits rows for each of rows, in order.
        """
        if not any(plan.num_drafts for plan in rows):
            return [[one] for one in self.sample(logits, rows, masks)]
        if isinstance(logits, ModelSampled):  # sampled already, and these rows have no history
            assert len(logits.tokens) == sum(1 + plan.num_drafts for plan in rows), "one token for each position"
            return accepted_of(rows, logits.tokens, self._model_sample)
        verifications = [Verification(plan, self._rows.state(plan.row)) for plan in rows]
        plans = [plan for one in verifications for plan in one.position_plans]
        self._check(logits, len(plans))
        while wave := next_logits_rows(verifications):
            with torch.inference_mode():
                part = logits if len(wave) == len(plans) else logits[torch.tensor(wave, device=self._rows.device)]
                drawn = iter(self._draw(part, [plans[i] for i in wave], masks))
            for one in verifications:
                one.take(drawn)
        return [one.accepted for one in verifications]

    def _check(self, logits: Tensor, num_rows: int) -> None:
        assert logits.shape == (num_rows, self._vocab_size), f"{tuple(logits.shape)} logits for {num_rows} rows"

    def _draw(self, logits: Tensor, rows: list[RowPlan], masks: StepMasks | None) -> list[Sample]:
        """Sample one token per logits row, without recording it in a history."""
        if not rows:
            return []
        in_use = self._rows.gather(rows, masks)
        tokens, surprises = self._choose(logits, in_use)
        errors = [state.refusal or _ERRORS.get(token) for state, token in zip(in_use.states, tokens, strict=True)]
        logprobs = _requested_logprobs(logits, rows, in_use, tokens, errors)
        return [
            Sample(
                token,
                logprobs.get(i),
                in_use.states[i].mu_after(surprises.get(i)),
                errors[i],
            )
            for i, token in enumerate(tokens)
        ]

    def _model_sample(self, plan: RowPlan, token: int) -> Sample:
        """Return the token that the model sampled for a row, or the error of the row."""
        return Sample(token, error=self._rows.state(plan.row).refusal or _ERRORS.get(token))

    def _choose(self, logits: Tensor, rows: RowsInUse) -> tuple[list[int], dict[int, float]]:
        """Return a token, BROKEN or _EMPTY for each row, and by logits row the surprise of tokens of mirostat."""
        native = [i for i, state in enumerate(rows.states) if self._native.can_draw(state)]
        if not native:
            return _by_steps(logits, rows)
        tokens = dict(zip(native, self._native.draw(logits, rows.select(native), native), strict=True))
        others = [i for i in range(len(rows.states)) if i not in tokens]
        if not others:
            return list(tokens.values()), {}
        found, surprises = _by_steps(logits[torch.tensor(others)], rows.select(others))
        tokens |= zip(others, found, strict=True)
        return [tokens[i] for i in sorted(tokens)], {others[i]: bits for i, bits in surprises.items()}


def _by_steps(logits: Tensor, rows: RowsInUse) -> tuple[list[int], dict[int, float]]:
    if all(state.takes_highest for state in rows.states):
        return greedy_tokens(logits).tokens, {}
    padded = aligned_rows(logits)
    is_finite = _has_finite_max(padded)
    final = run_steps(padded, rows, LOGITS_STEPS)
    has_token = is_finite if final is padded else _has_finite_max(final)
    tokens = torch.empty(len(rows.states), dtype=torch.int64, device=logits.device)
    surprises: dict[int, float] = {}
    for is_greedy in (True, False):
        logits_rows = [i for i, state in enumerate(rows.states) if state.params.is_greedy is is_greedy]
        if not logits_rows:
            continue
        index = torch.tensor(logits_rows, device=logits.device)
        part = final if len(logits_rows) == len(rows.states) else final.index_select(0, index)
        if is_greedy:
            tokens[index] = argmax_rows(part)
        else:
            tokens[index], found = _drawn(part, rows.select(logits_rows))
            surprises = {logits_rows[i]: surprise for i, surprise in found.items()}
    return tokens.where(has_token, _EMPTY).where(is_finite, BROKEN).tolist(), surprises


def _drawn(logits: Tensor, rows: RowsInUse) -> tuple[Tensor, dict[int, float]]:
    fixed_probs = run_steps(to_fixed_probs(logits), rows, PROBS_STEPS)
    tokens = draw(fixed_probs, rows.uniforms(DRAW))
    return tokens, _surprises(fixed_probs, tokens, rows.using("mirostat"))


def _surprises(fixed_probs: Tensor, tokens: Tensor, logits_rows: list[int]) -> dict[int, float]:
    """Return -log2 of each sampled token's share of the probabilities left, from integers, so the same in any batch."""
    if not logits_rows:
        return {}
    index = torch.tensor(logits_rows, device=fixed_probs.device)
    chosen = fixed_probs[index, tokens[index].clamp(max=fixed_probs.shape[-1] - 1)].tolist()
    totals = fixed_probs[index].sum(dim=-1).tolist()
    return {i: math.log2(all_ / max(1, one)) for i, one, all_ in zip(logits_rows, chosen, totals, strict=True) if all_}


def _has_finite_max(logits: Tensor) -> Tensor:
    """Return whether the highest logit of each row is finite, bool [S]. The maximum of a row with a NaN is NaN."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.isfinite(logits.numpy().max(axis=-1)))
    return logits.amax(dim=-1).isfinite()


def _requested_logprobs(
    logits: Tensor, plans: Sequence[RowPlan], rows: RowsInUse, tokens: list[int], errors: list[str | None]
) -> dict[int, TokenLogprobs]:
    """Return logprobs by logits row, for the rows that request them and have a token."""
    nums = {i: plan.num_logprobs for i, plan in enumerate(plans) if plan.num_logprobs is not None}
    requested = {i: num for i, num in nums.items() if errors[i] is None}
    if not requested:
        return {}
    found: dict[int, TokenLogprobs] = {}
    for part, alternatives_of in _by_distribution(list(requested), rows):
        chosen = logits.index_select(0, torch.tensor(part, device=logits.device))
        drawn, counts = [tokens[i] for i in part], [requested[i] for i in part]
        found |= zip(part, alternatives_of(chosen, drawn, counts, rows.select(part)), strict=True)
    return found


def _by_distribution(logits_rows: list[int], rows: RowsInUse) -> list[tuple[list[int], Alternatives]]:
    """Split rows by the distribution of their logprobs.

    Beams choose among the alternatives, so theirs come after all steps; others get those of the model's distribution.
    """
    edited = [i for i in logits_rows if rows.states[i].params.beam and rows.states[i].steps]
    plain = [i for i in logits_rows if i not in edited]
    parts: list[tuple[list[int], Alternatives]] = [(plain, _model_logprobs), (edited, _edited_logprobs)]
    return [part for part in parts if part[0]]


def _model_logprobs(logits: Tensor, tokens: list[int], nums: list[int], rows: RowsInUse) -> list[TokenLogprobs]:
    return token_logprobs(logits, tokens, nums)


def _edited_logprobs(logits: Tensor, tokens: list[int], nums: list[int], rows: RowsInUse) -> list[TokenLogprobs]:
    """Return each logit after all steps minus the logsumexp before them: removed tokens are not renormalised away."""
    edited = run_steps(aligned_rows(logits), rows, LOGITS_STEPS)[:, : logits.shape[-1]]
    shifts = (edited.logsumexp(-1) - logits.logsumexp(-1)).tolist()
    return [
        TokenLogprobs(
            found.token_id, found.logprob + shift, found.rank, found.top_ids, [v + shift for v in found.top_logprobs]
        )
        for found, shift in zip(token_logprobs(edited, tokens, nums), shifts, strict=True)
    ]
