"""The gated short convolution in plain torch.

Each token's input b * x is written to the paged cache; its output is the weighted sum, per channel, of its own and
earlier tokens' inputs, times the gate c.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.ops.batch import ForwardBatch


@dataclass(frozen=True)
class EarlierInputs:
    """The cache slots of a step's tokens and of the tokens before them."""

    slots: torch.Tensor  # int64 [T]: the slot of each token's input
    earlier: torch.Tensor  # int64 [T, kernel - 1]: the slots of the tokens before it, the oldest first
    exists: torch.Tensor  # bool [T, kernel - 1]: False before the beginning of the sequence


def plan_short_conv(batch: ForwardBatch, group: int, kernel: int) -> EarlierInputs:
    device = batch.query_starts.device
    starts, tables = batch.query_starts.long(), batch.groups[group].block_tables.long()
    tokens = torch.arange(len(batch.token_ids), device=device)
    owners = torch.bucketize(tokens, starts[1:], right=True)
    positions = batch.context_lens.long()[owners] - (starts[owners + 1] - tokens)
    before = positions.unsqueeze(1) - torch.arange(kernel - 1, 0, -1, device=device)
    clamped = before.clamp(min=0)
    blocks = tables[owners].gather(1, clamped // batch.block_size)
    earlier = blocks * batch.block_size + clamped % batch.block_size
    return EarlierInputs(batch.groups[group].slots, earlier, before >= 0)


def short_conv(
    projected: torch.Tensor,
    inputs: torch.Tensor,
    plan: EarlierInputs,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Convolve and gate. Taps are added in order, the oldest first, so that a token's sum is the same in any step."""
    b, c, x = projected.chunk(3, dim=-1)
    kept = inputs.view(-1, inputs.shape[-1])
    kept[plan.slots] = b * x
    total = torch.zeros(b.shape, dtype=torch.float32, device=b.device)
    if bias is not None:
        total += bias
    for tap in range(plan.earlier.shape[1]):
        values = kept[plan.earlier[:, tap]].float()
        total += weight[:, tap] * values.masked_fill(~plan.exists[:, tap].unsqueeze(1), 0.0)
    total += weight[:, -1] * kept[plan.slots].float()
    return (c.float() * total).to(projected.dtype)
