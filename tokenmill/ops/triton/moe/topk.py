"""The router's choice of experts: the k best of a token's logits.

`route` writes weights and ids of all tokens, one program a token. The GEMV kernels of a few tokens need neither: a
program finds the expert that it works for in its token's logits (`choice_of`), in a few dozen steps of a warp.
Logits are compared as integers, of which a maximum is two instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.interface import Routing
from tokenmill.ops.reference.experts import route as reference_route
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


def route(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    if not routing.is_plain:
        return reference_route(logits, routing)
    num_active, renormalize = routing.num_active, routing.spec.renormalize
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, num_active, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, num_active, dtype=torch.int64, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits.contiguous(), weights, ids, num_experts, num_active, next_power_of_2(num_active),
            next_power_of_2(num_experts), renormalize, num_warps=1, **launch_options(),
        )  # fmt: skip
    return weights, ids


LOWEST = tl.constexpr(-(2**31))


@triton.jit
def ordered_logits(logits, token, num_experts, BLOCK: tl.constexpr):
    """Logits [BLOCK] as integers in the same order; experts that do not exist come after all others"""
    experts = tl.arange(0, BLOCK)
    # Not by way of the first-level cache, which may know older ones: downs look before they wait.
    at = logits + token * num_experts + experts
    values = tl.load(at, mask=experts < num_experts, other=0.0, cache_modifier=".cg")
    bits = values.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(experts < num_experts, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LOWEST)


@triton.jit
def logit_of(ordered):
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def next_choice(left, BLOCK: tl.constexpr):
    """The best expert of those left, the first among equals; its logit; those left without it"""
    experts = tl.arange(0, BLOCK)
    best = tl.max(left, axis=0)
    expert = tl.min(tl.where(left == best, experts, BLOCK), axis=0)
    return expert.to(tl.int64), logit_of(best), tl.where(experts == expert, LOWEST, left)


@triton.jit
def choice_of(logits, token, choice, num_experts, K: tl.constexpr, BLOCK: tl.constexpr):
    """The expert that is a token's first choice, second, ..."""
    expert, _, left = next_choice(ordered_logits(logits, token, num_experts, BLOCK), BLOCK)
    if K == 2:  # ptxas 12.8 makes a loop of one round at most a condition, and that the reduction's mask
        second, _, left = next_choice(left, BLOCK)
        expert = tl.where(choice == 1, second, expert)
    else:
        for _ in range(choice):
            expert, _, left = next_choice(left, BLOCK)
    return expert
