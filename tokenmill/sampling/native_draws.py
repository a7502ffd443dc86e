"""Draws on a CPU by native kernels, for rows that ask for nothing but temperature, top-k, top-p and min-p.

These are what most rows ask for. The kernels give the token that the steps in `truncate`, `cuts` and `draw` give, in a
tenth of the time: they walk over a row's logits while these are in the cache, and never sort them.

    logits ─► over temperature, top-k ─► softmax (torch, as for all other rows) ─► top-p, min-p, draw
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokenmill.ops.cpu.availability import is_available, native
from tokenmill.sampling.fixed_point import ROW_ALIGNMENT
from tokenmill.sampling.rows import RowsInUse, RowState
from tokenmill.sampling.stream import DRAW

_STEPS = frozenset({"temperature", "top_k", "top_p", "min_p"})
_LEAST_TEMPERATURE = 1e-37  # below, a float32 is no longer exact, or 0


class NativeDraws:
    """Keeps its memory from step to step: fresh pages for megabytes of logits cost more than the arithmetic."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._width = vocab_size + -vocab_size % ROW_ALIGNMENT
        self._is_here = device.type == "cpu" and is_available()[0]
        self._shaped = self._probs = torch.empty(0, self._width)

    def can_draw(self, state: RowState) -> bool:
        params = state.params
        return self._is_here and state.steps <= _STEPS and params.temperature >= _LEAST_TEMPERATURE

    def draw(self, logits: Tensor, rows: RowsInUse, lines: list[int], otherwise: int) -> list[int]:
        """A token for each of `rows`, whose logits are at `lines`; `otherwise` where the highest is not finite."""
        shaped, probs = self._rooms(len(lines))
        sound, tokens = np.zeros(len(lines), np.uint8), np.full(len(lines), otherwise)
        states, knobs = rows.states, [state.params for state in rows.states]
        temperatures = [state.params.temperature if "temperature" in state.steps else 0.0 for state in states]
        native().shape_rows(
            logits.float().contiguous(),
            np.array(lines),
            np.array(temperatures, np.float32),
            np.array([p.top_k for p in knobs]),
            shaped,
            sound,
        )
        torch.softmax(shaped, dim=-1, out=probs)
        top_ps, min_ps = np.array([p.top_p for p in knobs]), np.array([p.min_p for p in knobs])
        native().draw_rows(probs, top_ps, min_ps, np.array(rows.uniforms(DRAW)), sound, tokens)
        return tokens.tolist()

    def _rooms(self, count: int) -> tuple[Tensor, Tensor]:
        if len(self._shaped) < count:
            self._shaped, self._probs = torch.empty(count, self._width), torch.empty(count, self._width)
        return self._shaped[:count], self._probs[:count]
