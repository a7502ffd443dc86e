"""A sequence that draws in the next step, as far as speculation must know it."""

from __future__ import annotations

from typing import NamedTuple

from tokenmill.params import SamplingParams
from tokenmill.speculate.draft_state import DraftState


class DraftRequest(NamedTuple):
    draft_state: DraftState
    tokens: list[int]  # prompt and answer so far
    prompt_len: int
    most: int  # drafts that could be of use
    row: int
    params: SamplingParams
    seed: int
