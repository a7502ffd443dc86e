"""The router's choice: softmax over the experts, the k best, one program a token."""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.ops.triton.launch.kernel import kernel, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous


@kernel
def _route(
    logits, weights, ids, num_experts,
    K: tl.constexpr, K_PADDED: tl.constexpr, BLOCK: tl.constexpr, RENORMALIZE: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    places = tl.arange(0, K_PADDED)
    values = tl.load(logits + token * num_experts + experts, mask=experts < num_experts, other=float("-inf"))
    values = values.to(tl.float32)
    shares = tl.exp(values - tl.max(values, axis=0))
    shares = shares / tl.sum(shares, axis=0)
    chosen = tl.zeros((K_PADDED,), tl.float32)
    chosen_ids = tl.zeros((K_PADDED,), tl.int64)
    for place in tl.static_range(K):
        best = tl.max(shares, axis=0)
        expert = tl.min(tl.where(shares == best, experts, BLOCK - 1), axis=0)  # the first among equals
        chosen = tl.where(places == place, best, chosen)
        chosen_ids = tl.where(places == place, expert.to(tl.int64), chosen_ids)
        shares = tl.where(experts == expert, -1.0, shares)
    if RENORMALIZE:
        chosen = chosen / tl.sum(chosen, axis=0)
    tl.store(weights + token * K + places, chosen, mask=places < K)
    tl.store(ids + token * K + places, chosen_ids, mask=places < K)


def route(logits: torch.Tensor, num_active: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, num_active, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, num_active, dtype=torch.int64, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits.contiguous(), weights, ids, num_experts, num_active, next_power_of_2(num_active),
            next_power_of_2(num_experts), renormalize, num_warps=1, **launch_options(),
        )  # fmt: skip
    return weights, ids
