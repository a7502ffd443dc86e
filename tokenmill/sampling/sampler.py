"""The batched sampler: logits in, one drawn token per row out.

A row's token is a pure function of its own logits, parameters, history, seed and output index; nothing of its
neighbours
enters (see `fixed_point` and `stream`). A row whose logits are broken gets an error, and the others never notice.

    sampler.add_row(new_row)        take a row, or take it anew: replaces all it held (resume, fork, beam reorder)
    sampler.observe(plans)          what a step feeds: tokens that were not drawn here enter their row's history
    sampler.sample(logits, plans)   draws, and records each drawn token in its row's history
    sampler.verify(logits, plans)   the same where rows may carry drafts (`verify`)
    sampler.needs_logits(plans)     or whether each line's best token is enough (`chosen`)
    sampler.plain_draws(plans)      how a model itself may draw for them, if it may
    sampler.free_row(row)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tokenmill.guided.masks import StepMasks
from tokenmill.ops.batch import DrawParams
from tokenmill.sampling.draw import Sample, draw
from tokenmill.sampling.fixed_point import aligned_rows, weights
from tokenmill.sampling.logprobs import token_logprobs
from tokenmill.sampling.model_sampled import BROKEN, HeadOutput, ModelSampled, highest_of, places_of_highest
from tokenmill.sampling.native_sampler import NativeDraws, draw_params
from tokenmill.sampling.rng import DRAW
from tokenmill.sampling.rows import RowsInUse, RowState, SamplerRows
from tokenmill.sampling.steps import CUTS, LOGITS_STEPS, run_steps, steps_used
from tokenmill.sampling.verify import Attempt, accepted_of, next_lines
from tokenmill.types import RowInit, RowPlan, TokenLogprobs

Alternatives = Callable[[Tensor, list[int], list[int], RowsInUse], list[TokenLogprobs]]

_EMPTY = -2  # every token was excluded

_ERRORS = {
    BROKEN: "the model computed NaN or infinite logits for this sequence",
    _EMPTY: "no token is left to draw: allowed_token_ids, banned_token_ids, min_tokens, no_repeat_ngram_size, logits "
    "processors and the grammar together exclude every one",
}


class Sampler:
    def __init__(self, vocab_size: int, max_rows: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._rows = SamplerRows(vocab_size, max_rows, torch.device(device))
        self._native = NativeDraws(self._rows.device)

    def add_row(self, new_row: RowInit) -> None:
        self._rows.take(new_row, steps_used(new_row.params))

    def free_row(self, row: int) -> None:
        self._rows.free(row)

    def observe(self, rows: Sequence[RowPlan]) -> None:
        """What is fed in this step; to be called before `sample`."""
        self._rows.observe(rows)

    def needs_logits(self, rows: Sequence[RowPlan]) -> bool:
        """Return whether these rows need more than the token with the highest logit of each line."""
        return not all(plan.num_logprobs is None and self._rows.state(plan.row).takes_highest for plan in rows)

    def plain_draws(self, rows: Sequence[RowPlan]) -> DrawParams | None:
        """Knobs for all lines of these rows where nothing else decides on their tokens; else None."""
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
        """Draw for logits float32 [S, vocab], row i for rows[i]; the logits are left as they were.

        `masks`: what the grammars of rows with `params.guided` allow.
        """
        self._check(logits, len(rows))
        if isinstance(logits, ModelSampled):  # rows that a model can draw for remember nothing
            return self._taken(logits, rows)
        with torch.inference_mode():
            drawn = self._draw(logits, rows, masks)
        for plan, one in zip(rows, drawn, strict=True):
            if one.error is None:
                self._rows.state(plan.row).record(one.token_id, one.mirostat_mu)
        return drawn

    def verify(self, logits: HeadOutput, rows: list[RowPlan], masks: StepMasks | None = None) -> list[list[Sample]]:
        """Draw at the last token of each row and after each of its drafts, as far as these are what was drawn.

        logits float32 [S, vocab]: 1 + num_drafts lines for each of rows, in order.
        """
        if not any(plan.num_drafts for plan in rows):
            return [[one] for one in self.sample(logits, rows, masks)]
        if isinstance(logits, ModelSampled):  # nothing is left to draw, and these rows remember nothing
            self._check(logits, sum(1 + plan.num_drafts for plan in rows))
            return accepted_of(rows, logits.tokens, self._told)
        attempts = [Attempt(plan, self._rows.state(plan.row)) for plan in rows]
        lines = [line for attempt in attempts for line in attempt.lines]
        self._check(logits, len(lines))
        while wave := next_lines(attempts):
            with torch.inference_mode():
                part = logits if len(wave) == len(lines) else logits[torch.tensor(wave, device=self._rows.device)]
                drawn = iter(self._draw(part, [lines[number] for number in wave], masks))
            for attempt in attempts:
                attempt.take(drawn)
        return [attempt.accepted for attempt in attempts]

    def _check(self, logits: HeadOutput, num_lines: int) -> None:
        wanted = (num_lines,) if isinstance(logits, ModelSampled) else (num_lines, self._vocab_size)
        assert logits.shape == wanted, f"{tuple(logits.shape)} logits for {num_lines} lines"

    def _draw(self, logits: Tensor, rows: list[RowPlan], masks: StepMasks | None) -> list[Sample]:
        """One token a line, recorded nowhere."""
        if not rows:
            return []
        in_use = self._rows.gather(rows, masks)
        tokens, surprises = self._choose(logits, in_use)
        errors = [state.refusal or _ERRORS.get(token) for state, token in zip(in_use.states, tokens, strict=True)]
        logprobs = _asked_logprobs(logits, rows, in_use, tokens, errors)
        return [
            Sample(token, logprobs.get(line), in_use.states[line].mu_after(surprises.get(line)), errors[line])
            for line, token in enumerate(tokens)
        ]

    def _taken(self, chosen: ModelSampled, rows: list[RowPlan]) -> list[Sample]:
        return [self._told(plan, token) for plan, token in zip(rows, chosen.tokens, strict=True)]

    def _told(self, plan: RowPlan, token: int) -> Sample:
        """What a model chose for a row, or what is wrong with it."""
        return Sample(token, error=self._rows.state(plan.row).refusal or _ERRORS.get(token))

    def _choose(self, logits: Tensor, rows: RowsInUse) -> tuple[list[int], dict[int, float]]:
        """A token, BROKEN or _EMPTY for each row; and by line the surprise of each token that mirostat drew."""
        native = [line for line, state in enumerate(rows.states) if self._native.can_draw(state)]
        if not native:
            return _by_steps(logits, rows)
        tokens = dict(zip(native, self._native.draw(logits, rows.select(native), native), strict=True))
        others = [line for line in range(len(rows.states)) if line not in tokens]
        if not others:
            return list(tokens.values()), {}
        found, surprises = _by_steps(logits[torch.tensor(others)], rows.select(others))
        tokens |= zip(others, found, strict=True)
        return [tokens[line] for line in sorted(tokens)], {others[line]: bits for line, bits in surprises.items()}


def _by_steps(logits: Tensor, rows: RowsInUse) -> tuple[list[int], dict[int, float]]:
    if all(state.takes_highest for state in rows.states):
        return highest_of(logits).tokens, {}
    padded = aligned_rows(logits)
    is_sound = _has_highest(padded)
    final = run_steps(padded, rows, LOGITS_STEPS)
    has_token = is_sound if final is padded else _has_highest(final)
    tokens = torch.empty(len(rows.states), dtype=torch.int64, device=logits.device)
    surprises: dict[int, float] = {}
    for is_greedy in (True, False):
        lines = [line for line, state in enumerate(rows.states) if state.params.is_greedy is is_greedy]
        if not lines:
            continue
        index = torch.tensor(lines, device=logits.device)
        part = final if len(lines) == len(rows.states) else final.index_select(0, index)
        if is_greedy:
            tokens[index] = places_of_highest(part)
        else:
            tokens[index], found = _drawn(part, rows.select(lines))
            surprises = {lines[line]: surprise for line, surprise in found.items()}
    return tokens.where(has_token, _EMPTY).where(is_sound, BROKEN).tolist(), surprises


def _drawn(logits: Tensor, rows: RowsInUse) -> tuple[Tensor, dict[int, float]]:
    mass = run_steps(weights(logits), rows, CUTS)
    tokens = draw(mass, rows.uniforms(DRAW))
    return tokens, _surprises(mass, tokens, rows.lines_using("mirostat"))


def _surprises(mass: Tensor, tokens: Tensor, lines: list[int]) -> dict[int, float]:
    """-log2 of each drawn token's share of what was left, from whole numbers, so the same in any batch."""
    if not lines:
        return {}
    index = torch.tensor(lines, device=mass.device)
    chosen = mass[index, tokens[index].clamp(max=mass.shape[-1] - 1)].tolist()
    totals = mass[index].sum(dim=-1).tolist()
    return {line: math.log2(all_ / max(1, one)) for line, one, all_ in zip(lines, chosen, totals, strict=True) if all_}


def _has_highest(logits: Tensor) -> Tensor:
    """bool [S]: the highest logit is a number. The maximum of a row with a NaN is NaN."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.isfinite(logits.numpy().max(axis=-1)))
    return logits.amax(dim=-1).isfinite()


def _asked_logprobs(
    logits: Tensor, plans: Sequence[RowPlan], rows: RowsInUse, tokens: list[int], errors: list[str | None]
) -> dict[int, TokenLogprobs]:
    """By line, for exactly the rows that ask and have a token."""
    nums = {line: plan.num_logprobs for line, plan in enumerate(plans) if plan.num_logprobs is not None}
    asked = {line: num for line, num in nums.items() if errors[line] is None}
    if not asked:
        return {}
    found: dict[int, TokenLogprobs] = {}
    for part, alternatives_of in _told_apart(list(asked), rows):
        chosen = logits.index_select(0, torch.tensor(part, device=logits.device))
        drawn, counts = [tokens[line] for line in part], [asked[line] for line in part]
        found |= zip(part, alternatives_of(chosen, drawn, counts, rows.select(part)), strict=True)
    return found


def _told_apart(lines: list[int], rows: RowsInUse) -> list[tuple[list[int], Alternatives]]:
    """A beam chooses among the alternatives, so they must be as its parameters make them; anyone else sees the
    model's."""
    edited = [line for line in lines if rows.states[line].params.beam and rows.states[line].steps]
    plain = [line for line in lines if line not in edited]
    parts: list[tuple[list[int], Alternatives]] = [(plain, _any_tokens), (edited, _edited_tokens)]
    return [part for part in parts if part[0]]


def _any_tokens(logits: Tensor, tokens: list[int], nums: list[int], rows: RowsInUse) -> list[TokenLogprobs]:
    return token_logprobs(logits, tokens, nums)


def _edited_tokens(logits: Tensor, tokens: list[int], nums: list[int], rows: RowsInUse) -> list[TokenLogprobs]:
    """Each logit after all steps, less the log of what all tokens weigh before any: what is cut leaves no share."""
    edited = run_steps(aligned_rows(logits), rows, LOGITS_STEPS)[:, : logits.shape[-1]]
    shifts = (edited.logsumexp(-1) - logits.logsumexp(-1)).tolist()
    return [
        TokenLogprobs(
            found.token_id, found.logprob + shift, found.rank, found.top_ids, [v + shift for v in found.top_logprobs]
        )
        for found, shift in zip(token_logprobs(edited, tokens, nums), shifts, strict=True)
    ]
