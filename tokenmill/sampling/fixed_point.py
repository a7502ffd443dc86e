"""Fixed-point probabilities: softmax, sums, top-k and sampling whose result does not depend on the batch.

Floating-point sums change with the way a device splits the work, and that way changes with the batch size. Here
probabilities become integers in units of 2**-50 first. Integer addition is exact, so cumulative sums, totals and
thresholds are the same for a row alone and for a row in a batch of a thousand, on every device. Only operations that
round once per element, or that work row by row (softmax), come before the conversion; rows are padded to full vectors
so that each row starts equally aligned.

A token is sampled by inverting the cumulative distribution, in vocabulary order:

    fixed_probs   |  t0  |t1|      t2      | t3 |      u in [0, 1) falls into exactly one token's interval
                  0             ^ u * total     total
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.ops.cpu.availability import is_available, native

ROW_ALIGNMENT = 16  # elements
_ONE = 2.0**50


def aligned_rows(logits: Tensor) -> Tensor:
    """Return logits [S, vocab] as contiguous float32, padded with -inf to a multiple of ROW_ALIGNMENT columns."""
    missing = -logits.shape[-1] % ROW_ALIGNMENT
    logits = logits.float()
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits.contiguous()


def to_fixed_probs(logits: Tensor) -> Tensor:
    """Return softmax(logits) as integers in units of 2**-50, int64 [S, V]; a row sums to 2**50, up to rounding."""
    # float32 times a power of two is exact; a probability below 2**-50 becomes 0 and is never sampled
    return _softmax(logits).mul_(_ONE).long()


def _softmax(logits: Tensor) -> Tensor:
    """Softmax by the native kernel that `NativeDraws` uses, if it is built: both then sample the same token."""
    if logits.device.type != "cpu" or not is_available()[0]:
        return torch.softmax(logits, dim=-1)
    probabilities = torch.empty_like(logits)
    native().softmax_rows(logits.contiguous(), probabilities)
    return probabilities


def exact_sum(values: Tensor, bits: int = 40) -> Tensor:
    """Sum values [S, V] along the last axis, each rounded to a multiple of 2**-bits: float64 [S, 1].

    The largest value times V must stay below 2**(63 - bits). NaN and infinities count as 0.
    """
    scaled = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0).double() * 2.0**bits
    return scaled.round().long().sum(dim=-1, keepdim=True).double() * 2.0**-bits


def draw(fixed_probs: Tensor, uniforms: list[float]) -> Tensor:
    """Sample a token id per row of fixed_probs, int64 [S, V] -> [S]; `uniforms` holds one number in [0, 1) per row."""
    cumulative = fixed_probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    u = torch.tensor(uniforms, dtype=torch.float64, device=fixed_probs.device).unsqueeze(1)
    target = torch.minimum((u * total.double()).long(), total - 1)
    # first token whose interval ends beyond the target; a token of probability 0 has an empty interval
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest values of each row of [U, V], highest first, and their columns: both [U, k].

    The k highest values lie in the k blocks with the highest maxima: one fast pass takes the maxima of blocks of 16,
    and only k blocks are searched after it. The order of equal values is not defined: callers use the values only, or
    break ties themselves.
    """
    num_rows, vocab = values.shape
    if vocab % ROW_ALIGNMENT or 4 * k * ROW_ALIGNMENT > vocab:
        return _torch_topk(values, k)
    blocks = values.view(num_rows, -1, ROW_ALIGNMENT)
    _, chosen = _torch_topk(blocks.amax(dim=-1), k)  # [U, k] blocks
    inside = blocks.gather(1, chosen.unsqueeze(2).expand(-1, -1, ROW_ALIGNMENT))  # [U, k, 16]
    top, offset = _torch_topk(inside.flatten(1), k)
    block = chosen.gather(1, offset // ROW_ALIGNMENT)
    return top, block * ROW_ALIGNMENT + offset % ROW_ALIGNMENT


def _torch_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found = values.topk(k, dim=-1)
    return found.values, found.indices
