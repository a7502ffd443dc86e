"""Sums that do not depend on the order of adding.

Floating-point sums change with the way a device splits the work, and that way changes with the batch size. Here
probabilities become whole numbers of 2**-50 first; adding whole numbers is exact, so cumulative sums, totals and
the thresholds found in them are the same for a row alone and for a row among a thousand, on every device.
Only operations that are rounded once per element, or that work row by row (softmax), come before the conversion;
rows are padded to whole vectors so that each row starts equally aligned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.ops.cpu.availability import is_available, native

ROW_ALIGNMENT = 16  # elements
_ONE = 2.0**50


def aligned_rows(logits: Tensor) -> Tensor:
    """[S, vocab] as contiguous float32 with the vocabulary padded by -inf to a multiple of ROW_ALIGNMENT."""
    missing = -logits.shape[-1] % ROW_ALIGNMENT
    logits = logits.float()
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits.contiguous()


def weights(logits: Tensor) -> Tensor:
    """softmax(logits) in whole numbers of 2**-50: int64 [S, V]; a row adds up to 2**50 within float32 rounding."""
    # float32 times a power of two is exact; what is below 2**-50 becomes 0 and can never be drawn
    return _softmax(logits).mul_(_ONE).long()


def _softmax(logits: Tensor) -> Tensor:
    """On a CPU by the kernel that `native_draws` ends with: a token is the same whichever way it is drawn."""
    if logits.device.type != "cpu" or not is_available()[0]:
        return torch.softmax(logits, dim=-1)
    probabilities = torch.empty_like(logits)
    native().softmax_rows(logits.contiguous(), probabilities)
    return probabilities


def exact_sum(values: Tensor, bits: int = 40) -> Tensor:
    """Sum of [S, V] values along the last axis, float64 [S, 1], each rounded to a multiple of 2**-bits.

    Values times vocabulary must stay below 2**(63 - bits). NaN and infinities count as 0.
    """
    scaled = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0).double() * 2.0**bits
    return scaled.round().long().sum(dim=-1, keepdim=True).double() * 2.0**-bits
