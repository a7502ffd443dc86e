"""Draws on a CPU by native kernels, for rows that ask for nothing but temperature, top-k, top-p and min-p.

These are what most rows ask for. The kernels give the token that the steps in `truncate`, `cuts` and `draw` give, in a
twentieth of the time: each row is drawn from start to end while its logits are in the cache, nothing is sorted, and
with top-k only the logits that pass are ever looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.ops.batch import DrawParams
from tokenmill.ops.cpu.availability import is_available, native
from tokenmill.sampling.rng import DRAW, uniform
from tokenmill.sampling.rows import RowsInUse, RowState


class NativeDraws:
    def __init__(self, device: torch.device) -> None:
        self._is_here = device.type == "cpu" and is_available()[0]

    def can_draw(self, state: RowState) -> bool:
        return self._is_here and state.is_plain

    def draw(self, logits: Tensor, rows: RowsInUse, lines: list[int]) -> list[int]:
        """A token for each of `rows`, whose logits are at `lines`; BROKEN where the highest is not finite."""
        params = draw_params(rows.states, rows.output_indices)
        tokens: list[int] = native().draw_rows(logits.float().contiguous(), lines, *params)
        return tokens


def draw_params(states: Sequence[RowState], output_indices: Sequence[int]) -> DrawParams:
    params = [state.params for state in states]
    return DrawParams(
        temperatures=[state.params.temperature if "temperature" in state.steps else 0.0 for state in states],
        top_ks=[p.top_k for p in params],
        top_ps=[p.top_p for p in params],
        min_ps=[p.min_p for p in params],
        uniforms=[uniform(state.seed, index, DRAW) for state, index in zip(states, output_indices, strict=True)],
        takes_best=[state.takes_highest for state in states],
    )
