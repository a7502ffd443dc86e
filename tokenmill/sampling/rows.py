"""The sampler's state of each permanent row, and the view of it that one step gathers.

Numeric parameters live in one table on the device, [max_rows, parameter], written once when a row is taken; a step
gathers the entries of its rows. Token lists (bias, allowed, banned, stop ids) and history stay on the host, per row,
and only where a row uses them. Taking a row replaces everything that the row held before.

`RowsInUse` is the argument of every sampler step: its entry i belongs to row i of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tokenmill.guided.masks import StepMasks
from tokenmill.params import SamplingParams
from tokenmill.sampling.history import History, history_of
from tokenmill.sampling.rng import uniform
from tokenmill.types import RowInit, RowPlan

PARAM_NAMES = (  # the columns of the parameter table
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "top_a",
    "epsilon_cutoff",
    "eta_cutoff",
    "xtc_threshold",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_COLUMN = {name: column for column, name in enumerate(PARAM_NAMES)}

PLAIN_STEPS = frozenset({"temperature", "top_k", "top_p", "min_p"})
LEAST_TEMPERATURE = 1e-37  # below it a float32 is inexact or 0, and its inverse overflows


@dataclass
class RowState:
    """Sampling state of one sequence; `steps` names the sampler steps that it uses."""

    params: SamplingParams
    seed: int
    steps: frozenset[str]
    stop_token_ids: list[int]
    history: History | None = None  # where a step depends on earlier tokens
    mirostat_mu: float | None = None  # with mirostat: the largest surprise that the next token may have
    refusal: str | None = None  # why no token can be sampled for this row
    takes_highest: bool = field(init=False)  # the next token is the one with the model's own highest logit
    is_plain: bool = field(init=False)  # greedy, or sampled with PLAIN_STEPS only

    def __post_init__(self) -> None:
        self.takes_highest = self.params.is_greedy and not self.steps
        is_usual = self.steps <= PLAIN_STEPS and self.params.temperature >= LEAST_TEMPERATURE
        self.is_plain = self.takes_highest or is_usual

    @property
    def past(self) -> History:
        assert self.history is not None, "a sampler step needs the token history, and the row has none"
        return self.history

    @property
    def has_history(self) -> bool:
        """Return whether the next token depends on the sampled tokens before it."""
        return self.history is not None or self.mirostat_mu is not None

    def record(self, token: int, mirostat_mu: float | None = None) -> None:
        """Add a fed or sampled token to the history; a sampled one comes with mirostat's next limit."""
        if self.history is not None:
            self.history.record(token)
        if mirostat_mu is not None:
            self.mirostat_mu = mirostat_mu

    def mu_after(self, surprise: float | None) -> float | None:
        """Return mirostat's limit after a token of this surprise: lower after much surprise, higher after little."""
        if self.mirostat_mu is None or surprise is None:
            return self.mirostat_mu
        return self.mirostat_mu - self.params.mirostat_eta * (surprise - self.params.mirostat_tau)


@dataclass(frozen=True)
class RowsInUse:
    """The U rows of one step, in the order of the logits."""

    states: Sequence[RowState]
    output_indices: Sequence[int]
    params: Tensor  # float64 [U, len(PARAM_NAMES)]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rows: Sequence[int] = ()  # numbers of the permanent rows
    vocab_size: int = 0  # logits have this many columns before they are padded
    masks: StepMasks | None = None  # what grammars allow, by row number
    num_drafts: Sequence[int] = ()  # number of draft tokens before each sampled position

    def param(self, name: str) -> Tensor:
        """Return one parameter of all rows, float32 [U, 1]."""
        return self.params[:, _COLUMN[name], None].float()

    def param64(self, name: str) -> Tensor:
        """Return one parameter of all rows, float64 [U, 1]."""
        return self.params[:, _COLUMN[name], None]

    def uniforms(self, purpose: int) -> list[float]:
        return [uniform(s.seed, i, purpose) for s, i in zip(self.states, self.output_indices, strict=True)]

    def using(self, step: str) -> list[int]:
        """Return the logits rows that use a step."""
        return [row for row, state in enumerate(self.states) if step in state.steps]

    def select(self, logits_rows: list[int]) -> RowsInUse:
        """Return the part of the step that belongs to these logits rows."""
        if len(logits_rows) == len(self.states):
            return self
        index = torch.tensor(logits_rows, device=self.device)
        return RowsInUse(
            states=[self.states[row] for row in logits_rows],
            output_indices=[self.output_indices[row] for row in logits_rows],
            params=self.params.index_select(0, index),
            device=self.device,
            rows=[self.rows[row] for row in logits_rows] if self.rows else (),
            vocab_size=self.vocab_size,
            masks=self.masks,
            num_drafts=[self.num_drafts[row] for row in logits_rows] if self.num_drafts else (),
        )

    def pairs(self, ids: Sequence[Sequence[int] | np.ndarray]) -> tuple[Tensor, Tensor]:
        """Flatten one list of token ids per row into (logits rows, token ids), ready to index the logits."""
        lengths = [len(row) for row in ids]
        logits_rows = np.repeat(np.arange(len(ids)), lengths)
        flat = np.concatenate([np.asarray(row, dtype=np.int64) for row in ids])
        return torch.from_numpy(logits_rows).to(self.device), torch.from_numpy(flat).to(self.device)


class SamplerRows:
    """The permanent rows: `take` fills one (or refills it), `free` clears it, `gather` collects the rows of a step."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.device = device
        self._states: list[RowState | None] = [None] * max_rows
        self._param_table = torch.zeros(max_rows, len(PARAM_NAMES), dtype=torch.float64, device=device)

    def take(self, new_row: RowInit, steps: frozenset[str]) -> None:
        params = new_row.params
        refusal = _unknown_token_ids(params, self._vocab_size)
        if refusal:
            steps = frozenset()
        self._param_table[new_row.row] = torch.tensor(
            [getattr(params, name) for name in PARAM_NAMES], dtype=torch.float64
        )
        self._states[new_row.row] = RowState(
            params=params,
            seed=new_row.seed,
            steps=steps,
            stop_token_ids=[token for token in new_row.stop_token_ids if 0 <= token < self._vocab_size],
            history=history_of(new_row, steps, self._vocab_size) if steps else None,
            mirostat_mu=_initial_mu(new_row) if "mirostat" in steps else None,
            refusal=refusal,
        )

    def free(self, row: int) -> None:
        self._states[row] = None

    def observe(self, plans: Sequence[RowPlan]) -> None:
        """Add fed tokens that were not sampled here (forced by a grammar) to the history; drafts only once accepted."""
        for plan in plans:
            state = self._states[plan.row]
            if state is not None and state.history is not None:
                end = len(plan.token_ids) - plan.num_drafts
                for token in plan.token_ids[max(0, state.history.num_tokens - plan.sequence_position) : end]:
                    state.record(token)

    def gather(self, plans: Sequence[RowPlan], masks: StepMasks | None = None) -> RowsInUse:
        index = torch.tensor([plan.row for plan in plans], device=self.device)
        return RowsInUse(
            states=[self.state(plan.row) for plan in plans],
            output_indices=[plan.output_index for plan in plans],
            params=self._param_table.index_select(0, index),
            device=self.device,
            rows=[plan.row for plan in plans],
            vocab_size=self._vocab_size,
            masks=masks,
            num_drafts=[plan.num_drafts for plan in plans],
        )

    def state(self, row: int) -> RowState:
        state = self._states[row]
        assert state is not None, f"row {row} was sampled before it was added"
        return state


def _initial_mu(new_row: RowInit) -> float:
    """Return mirostat's limit of a resumed row, or twice the target surprise, as llama.cpp."""
    return 2.0 * new_row.params.mirostat_tau if new_row.mirostat_mu is None else new_row.mirostat_mu


def _unknown_token_ids(params: SamplingParams, vocab_size: int) -> str | None:
    """Return an error if the request names a token id that the model does not have: it would index past the logits."""
    for name in ("logit_bias", "allowed_token_ids", "banned_token_ids"):
        for token in getattr(params, name) or ():
            if not 0 <= token < vocab_size:
                return f"{name} holds token id {token}, and this model's ids are 0 to {vocab_size - 1}"
    return None
