"""The argmax of each row's logits, in two passes: over parts of the vocabulary, then over the parts' results."""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.ops.triton.launch.kernel import cdiv, kernel, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

_BLOCK = 4096
NOT_FINITE = -1


@kernel
def _best_of_part(
    logits, highest, best, vocab_size, num_parts, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    values = tl.load(logits + row * vocab_size + ids, mask=inside, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("inf"))  # NaN becomes inf, so the row's result is not finite
    top = tl.max(values, axis=0)
    tl.store(highest + row * num_parts + part, top)
    tl.store(best + row * num_parts + part, tl.min(tl.where(values == top, ids, vocab_size), axis=0))


@kernel
def _best_of_row(
    highest, best, out, logit, num_parts, NOWHERE: tl.constexpr, PARTS: tl.constexpr, OVERLAPS: tl.constexpr
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    inside = parts < num_parts
    values = tl.load(highest + row * num_parts + parts, mask=inside, other=float("-inf"))
    ids = tl.load(best + row * num_parts + parts, mask=inside, other=0)
    top = tl.max(values, axis=0)
    found = tl.min(tl.where((values == top) & inside, ids, 0x7FFFFFFF), axis=0)
    is_finite = (top < float("inf")) & (top > float("-inf"))
    tl.store(out + row, tl.where(is_finite, found, NOWHERE).to(tl.int64))
    tl.store(logit + row, tl.where(is_finite, top, float("nan")))


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, vocab] → the highest logit's id, the lowest among equals, -1 where it is not finite, int64 [R]; that logit,
    or NaN, float32 [R]"""
    num_rows, vocab_size = logits.shape
    num_parts = cdiv(vocab_size, _BLOCK)
    highest = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    best = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logit = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _best_of_part[(num_rows, num_parts)](
            logits.contiguous(), highest, best, vocab_size, num_parts, _BLOCK, num_warps=4, **launch_options()
        )
        _best_of_row[(num_rows,)](
            highest, best, out, logit, num_parts, NOT_FINITE, next_power_of_2(num_parts),
            num_warps=1, **launch_options(),
        )  # fmt: skip
    return out, logit
