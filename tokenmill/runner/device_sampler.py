"""The sampler on a GPU: what it must know of each row is kept on the device as long as the row lives.

    parameters    float64 [max_rows, 8]       temperature, top_k, top_p, min_p, three penalties
    seen     int16 [max_rows, vocab]     0 never, else 1 + how often in the output; kept where a penalty is set
    counted  int32 [max_rows]            how many of the row's output tokens are in `seen`
    edits    ids, values, ends [max_rows, MAX_ROW_EDITS]   added to a logit while the output is shorter than `end`

Tokens are counted when they are fed, not when they are drawn, so what a void step drew is never counted. The random
numbers are the host's, a function of seed and output index, sent along with the row numbers. So are the masks of rows
with grammars, a bit for each token. A grammar may force tokens that are fed several at a time, of which only the last
would be counted, so with penalties such a row is the host's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.guided.masks import StepMasks
from tokenmill.ops.triton.sampling.penalties import count_fed, edit_logits, keep_allowed
from tokenmill.ops.triton.sampling.sample import draw_tokens
from tokenmill.params import DEVICE_PARAM_SLOTS, DEVICE_PARAMS, SamplingParams
from tokenmill.runner.memory import MAX_ROW_EDITS
from tokenmill.sampling.rng import uniform
from tokenmill.sampling.rows import LEAST_TEMPERATURE
from tokenmill.sampling.steps import steps_used
from tokenmill.types import RowInit

HANDLED = frozenset(("penalties", "bias", "banned", "min_tokens", "temperature", "top_k", "top_p", "min_p"))
HANDLED_WITH_GRAMMAR = HANDLED - {"penalties", "min_tokens"} | {"grammar"}  # min_tokens: the host knows exceptions
FOREVER = 2**31 - 1


def edits_of(new: RowInit) -> dict[int, tuple[float, int]] | None:
    """Changes of single logits: token → (what is added, until so many output tokens exist); None where a row needs more
    than that."""
    params = new.params
    found = {token: (float(value), FOREVER) for token, value in (params.logit_bias or {}).items()}
    found |= {token: (-np.inf, FOREVER) for token in params.banned_token_ids or ()}
    for token in new.stop_token_ids if params.min_tokens else ():
        value, _ = found.get(token, (-np.inf, 0))
        if value != -np.inf:
            return None  # a stop token with a bias of its own
        found.setdefault(token, (-np.inf, params.min_tokens))
    return found if len(found) <= MAX_ROW_EDITS else None


class DeviceSampler:
    """Draws tokens on the device, by the parameters in HANDLED."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._params_of = torch.zeros(max_rows, DEVICE_PARAM_SLOTS, dtype=torch.float64, device=device)
        self._seen = torch.zeros(max_rows, vocab_size, dtype=torch.int16, device=device)
        self._counted = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._edits = (
            torch.zeros(max_rows, MAX_ROW_EDITS, dtype=torch.int32, device=device),
            torch.zeros(max_rows, MAX_ROW_EDITS, dtype=torch.float32, device=device),
            torch.zeros(max_rows, MAX_ROW_EDITS, dtype=torch.int32, device=device),
        )
        self._has_edits = [False] * max_rows
        self._seeds = [0] * max_rows

    def can_draw(self, new: RowInit) -> bool:
        params = new.params
        if new.pooling is not None or params.beam is not None or params.logprobs is not None:
            return False
        handled = HANDLED if params.guided is None else HANDLED_WITH_GRAMMAR
        if not steps_used(params) <= handled or 0.0 < params.temperature < LEAST_TEMPERATURE:
            return False
        edits = edits_of(new)
        return edits is not None and all(0 <= token < self._vocab_size for token in edits)

    def take(self, rows: Sequence[RowInit]) -> None:
        """Take rows, or take them anew for another sequence's state."""
        if not rows:
            return
        numbers = self._to_device(np.array([new.row for new in rows]))
        values = np.array([_params_of(new.params) for new in rows], np.float64)
        num_outputs = np.array([len(new.output_token_ids) for new in rows], np.int32)
        self._params_of.index_copy_(0, numbers, self._to_device(values))
        self._counted.index_copy_(0, numbers, self._to_device(num_outputs))
        for new in rows:
            self._seeds[new.row] = new.seed
            self._take_edits(new)
            if "penalties" in steps_used(new.params):
                self._take_history(new)

    def uniforms(self, rows: Sequence[int], indices: Sequence[int]) -> list[float]:
        """The random number of each row's draw; `indices`: how many output tokens it has."""
        seeds = self._seeds
        return [uniform(seeds[row], index) for row, index in zip(rows, indices, strict=True)]

    def draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        indices: torch.Tensor,
        uniforms: torch.Tensor,
        newest: torch.Tensor,
    ) -> torch.Tensor:
        """Draw tokens int64 [R] from float32 logits [R, vocab], which are changed; rows, indices int32 [R]."""
        edit_logits(logits, rows, indices, self._params_of, self._seen, self._edits)
        return draw_tokens(logits, rows, uniforms, self._params_of, newest)

    def keep_allowed(self, logits: torch.Tensor, numbers: torch.Tensor, masks: StepMasks, rows: Sequence[int]) -> None:
        """Let rows `numbers` int32 [M] of logits [R, vocab] draw only what the masks of `rows` allow. Waits."""
        # Written where the device reads: torch would copy more than a few of them with all its threads.
        is_pinned = self._device.type == "cuda"
        sent = torch.empty(len(rows), masks.num_words, dtype=torch.int32, pin_memory=is_pinned)
        masks.copy_to(sent.numpy(), rows)
        keep_allowed(logits, numbers, sent.to(self._device, non_blocking=True))

    def count_fed(self, rows: torch.Tensor, indices: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count the tokens that rows feed last; `indices`: how many output tokens each row has."""
        count_fed(rows, indices, token_ids, self._params_of, self._seen, self._counted)

    def _take_edits(self, new: RowInit) -> None:
        edits = edits_of(new) or {}
        ids, values, ends = self._edits
        if self._has_edits[new.row]:
            ends[new.row].zero_()
        if edits:
            number = len(edits)
            ids[new.row, :number] = self._to_device(np.array(list(edits), np.int32))
            values[new.row, :number] = self._to_device(np.array([value for value, _ in edits.values()], np.float32))
            ends[new.row, :number] = self._to_device(np.array([end for _, end in edits.values()], np.int32))
        self._has_edits[new.row] = bool(edits)

    def _take_history(self, new: RowInit) -> None:
        prompt = np.array(new.prompt_token_ids, np.int64)
        output, times = np.unique(np.array(new.output_token_ids, np.int64), return_counts=True)
        prompt = prompt[(prompt >= 0) & (prompt < self._vocab_size)]  # placeholders have no logit
        seen = self._seen[new.row]
        seen.zero_()
        seen.index_fill_(0, self._to_device(prompt), 1)
        seen.index_copy_(0, self._to_device(output), self._to_device(np.minimum(times + 1, 32767).astype(np.int16)))

    def _to_device(self, values: NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)


def _params_of(params: SamplingParams) -> list[float]:
    return [float(getattr(params, name)) for name in DEVICE_PARAMS] + [0.0] * (DEVICE_PARAM_SLOTS - len(DEVICE_PARAMS))
