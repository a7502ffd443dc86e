"""The batched sampler: logits in, one drawn token per row out.

A row's token is a pure function of its own logits, knobs, history, seed and output index; nothing of its neighbours
enters (see `fixed_point` and `stream`). A row whose logits are broken gets an error, and the others never notice.

    sampler.add_row(new_row)        take a row, or take it anew: replaces all it held (resume, fork, beam reorder)
    sampler.sample(logits, plans)   draws, and records each drawn token in its row's history
    sampler.free_row(row)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.sampling.draw import draw
from tokenmill.sampling.fixed_point import aligned_rows, weights
from tokenmill.sampling.logprobs import token_logprobs
from tokenmill.sampling.rows import Rows, RowsInUse
from tokenmill.sampling.steps import CUTS, LOGITS_STEPS, run_steps, steps_used
from tokenmill.sampling.stream import DRAW
from tokenmill.types import NewRow, RowPlan, TokenLogprobs

_BROKEN = -1  # in place of a token: the model's logits are unusable
_EMPTY = -2  # every token was excluded

_ERRORS = {
    _BROKEN: "the model computed NaN or infinite logits for this sequence",
    _EMPTY: "no token is left to draw: allowed_token_ids, banned_token_ids, min_tokens and no_repeat_ngram_size "
    "together exclude every one",
}


@dataclass(frozen=True)
class Drawn:
    """`token_id` is meaningless where `error` is set."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Sampler:
    def __init__(self, vocab_size: int, max_rows: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._rows = Rows(vocab_size, max_rows, torch.device(device))

    def add_row(self, new_row: NewRow) -> None:
        self._rows.take(new_row, steps_used(new_row.params))

    def free_row(self, row: int) -> None:
        self._rows.free(row)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: list[RowPlan]) -> list[Drawn]:
        """Draw for logits float32 [S, vocab], row i for rows[i]; the logits are left as they were."""
        assert logits.shape == (len(rows), self._vocab_size), f"{tuple(logits.shape)} logits for {len(rows)} rows"
        if not rows:
            return []
        in_use = self._rows.gather(rows)
        tokens = _choose(logits, in_use)
        errors = [state.refusal or _ERRORS.get(token) for state, token in zip(in_use.states, tokens, strict=True)]
        self._record(in_use, tokens, errors)
        logprobs = _asked_logprobs(logits, rows, tokens, errors)
        return [Drawn(token, logprobs.get(line), errors[line]) for line, token in enumerate(tokens)]

    def _record(self, in_use: RowsInUse, tokens: list[int], errors: list[str | None]) -> None:
        for state, token, error in zip(in_use.states, tokens, errors, strict=True):
            if error is None:
                state.record(token)


def _choose(logits: Tensor, rows: RowsInUse) -> list[int]:
    """A token, _BROKEN or _EMPTY for each row."""
    if all(state.params.is_greedy and not state.steps for state in rows.states):
        best, is_sound = _best(logits)
        return best.where(is_sound, _BROKEN).tolist()
    padded = aligned_rows(logits)
    is_sound = padded.amax(dim=-1).isfinite()  # the maximum of a row with a NaN is NaN
    final = run_steps(padded, rows, LOGITS_STEPS)
    has_token = is_sound if final is padded else final.amax(dim=-1).isfinite()
    tokens = torch.empty(len(rows.states), dtype=torch.int64, device=logits.device)
    for is_greedy, pick in ((True, _highest), (False, _drawn)):
        lines = [line for line, state in enumerate(rows.states) if state.params.is_greedy is is_greedy]
        if lines:
            index = torch.tensor(lines, device=logits.device)
            part = final if len(lines) == len(rows.states) else final.index_select(0, index)
            tokens[index] = pick(part, rows.select(lines))
    return tokens.where(has_token, _EMPTY).where(is_sound, _BROKEN).tolist()


def _highest(logits: Tensor, rows: RowsInUse) -> Tensor:
    return logits.argmax(dim=-1)


def _drawn(logits: Tensor, rows: RowsInUse) -> Tensor:
    return draw(run_steps(weights(logits), rows, CUTS), rows.uniforms(DRAW))


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The highest logit's id per row (the lowest id among equals), and whether that logit is a number."""
    best = logits.argmax(dim=-1)
    return best, logits.gather(1, best.unsqueeze(1)).squeeze(1).isfinite()


def _asked_logprobs(
    logits: Tensor, plans: Sequence[RowPlan], tokens: list[int], errors: list[str | None]
) -> dict[int, TokenLogprobs]:
    """By line, for exactly the rows that ask and have a token."""
    nums = {line: plan.num_logprobs for line, plan in enumerate(plans) if plan.num_logprobs is not None}
    asked = {line: num for line, num in nums.items() if errors[line] is None}
    if not asked:
        return {}
    index = torch.tensor(list(asked), device=logits.device)
    found = token_logprobs(logits.index_select(0, index), [tokens[line] for line in asked], list(asked.values()))
    return dict(zip(asked, found, strict=True))
