"""A sequence that draws in the next step, as far as speculation must know it."""

from __future__ import annotations

from typing import NamedTuple

from tokenmill.params import SamplingParams
from tokenmill.speculate.trail import Trail


class Ask(NamedTuple):
    trail: Trail
    tokens: list[int]  # prompt and answer so far
    prompt_len: int
    most: int  # drafts that could be of use
    row: int
    params: SamplingParams
    seed: int
