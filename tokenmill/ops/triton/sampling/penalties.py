"""Logits processors on the device, before sampling (`sample.py`): penalties, grammar masks, and biases of single
tokens. Each row's parameters, biases and token counts are in tables by row.

The same steps in the same order as `sampling/steps.py`.
"""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.ops.triton.launch.kernel import cdiv, kernel
from tokenmill.params import DEVICE_PARAM_SLOTS

# The order of DEVICE_PARAMS.
TEMPERATURE, TOP_K, TOP_P, MIN_P = (tl.constexpr(number) for number in range(4))
REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(number) for number in range(4, 7))
NUM_PARAMS = tl.constexpr(DEVICE_PARAM_SLOTS)
BLOCK = 2048


@kernel
def _penalise(logits, rows, row_params, seen, vocab, BLOCK: tl.constexpr) -> None:
    """Apply penalties in place. `seen` int16 [max_rows, vocab]: 0 if not seen, else 1 + the count in the output."""
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number).to(tl.int64)
    if row >= 0:
        own = row_params + row * NUM_PARAMS
        repetition = tl.load(own + REPETITION).to(tl.float32)
        presence = tl.load(own + PRESENCE).to(tl.float32)
        frequency = tl.load(own + FREQUENCY).to(tl.float32)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            inside = tokens < vocab
            times = tl.load(seen + row * vocab + tokens, mask=inside, other=0).to(tl.int32)
            value = tl.load(logits + number * vocab + tokens, mask=inside, other=0.0)
            changed = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
            changed -= frequency * (times - 1).to(tl.float32)
            changed -= tl.where(times > 1, presence, 0.0)
            tl.store(logits + number * vocab + tokens, changed, mask=inside & (times > 0))


@kernel
def _add_edits(logits, rows, indices, edit_ids, edit_values, edit_ends, vocab, NUM_EDITS: tl.constexpr) -> None:
    """Add values to single logits, each while the output has fewer tokens than the value's end."""
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number).to(tl.int64)
    if row >= 0:
        edits = row * NUM_EDITS + tl.arange(0, NUM_EDITS)
        is_used = tl.load(edit_ends + edits) > tl.load(indices + number)
        targets = logits + number * vocab + tl.load(edit_ids + edits)
        value = tl.load(targets, mask=is_used, other=0.0) + tl.load(edit_values + edits)
        tl.store(targets, value, mask=is_used)


@kernel
def _keep_allowed(logits, numbers, masks, vocab, num_words, BLOCK: tl.constexpr) -> None:
    """Add minus infinity to tokens whose bit is not set; NaN stays NaN."""
    mask = tl.program_id(0)
    row = logits + tl.load(numbers + mask).to(tl.int64) * vocab
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    words = tl.load(masks + mask.to(tl.int64) * num_words + tokens // 32, mask=inside, other=-1)
    is_taken = inside & (((words >> (tokens % 32)) & 1) == 0)
    tl.store(row + tokens, tl.load(row + tokens, mask=is_taken, other=0.0) + float("-inf"), mask=is_taken)


@kernel
def _count_fed(rows, indices, token_ids, row_params, seen, counted, vocab) -> None:
    """Count the last fed token of each row, the n-th output token, unless it was counted before."""
    number = tl.program_id(0)
    row = tl.load(rows + number).to(tl.int64)
    if row >= 0:
        index, token = tl.load(indices + number), tl.load(token_ids + number)
        if index > tl.load(counted + row):
            own = row_params + row * NUM_PARAMS
            penalised = (tl.load(own + REPETITION) != 1.0) | (tl.load(own + PRESENCE) != 0.0)
            if penalised | (tl.load(own + FREQUENCY) != 0.0):
                times = tl.load(seen + row * vocab + token).to(tl.int32)
                tl.store(seen + row * vocab + token, tl.minimum(tl.maximum(times, 1) + 1, 32767).to(tl.int16))
            tl.store(counted + row, index)


def count_fed(
    rows: torch.Tensor,
    indices: torch.Tensor,
    token_ids: torch.Tensor,
    row_params: torch.Tensor,
    seen: torch.Tensor,
    counted: torch.Tensor,
) -> None:
    """rows, indices int32, token_ids [R]; updates `seen` int16 [max_rows, vocab] and `counted` int32 [max_rows]"""
    _count_fed[(len(rows),)](rows, indices, token_ids, row_params, seen, counted, seen.shape[1], num_warps=1)


def edit_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    row_params: torch.Tensor,
    seen: torch.Tensor,
    edits: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Apply penalties, then biases of single tokens (ids, values, ends [max_rows, E]), to logits [R, vocab] in
    place."""
    num_rows, vocab = logits.shape
    _penalise[(num_rows, cdiv(vocab, BLOCK))](logits, rows, row_params, seen, vocab, BLOCK, num_warps=8)
    _add_edits[(num_rows,)](logits, rows, indices, *edits, vocab, edits[0].shape[1], num_warps=2)


def keep_allowed(logits: torch.Tensor, numbers: torch.Tensor, masks: torch.Tensor) -> None:
    """Mask logits [R, vocab] in place: keep the tokens whose bits are set in masks int32 [M, words], lowest bit first,
    for rows `numbers` int32 [M]."""
    num_masks, num_words = masks.shape
    vocab = logits.shape[1]
    _keep_allowed[(num_masks, cdiv(vocab, BLOCK))](logits, numbers, masks, vocab, num_words, BLOCK, num_warps=8)
