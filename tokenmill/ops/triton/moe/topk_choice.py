"""Expert chosen by a router, found by the program that computes it: the highest of a token's logits, the second, ...

A few dozen steps of a warp. Logits are compared as integers, whose maximum takes two instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))


@triton.jit
def ordered_logits(logits, token, num_experts, BLOCK: tl.constexpr):
    """Logits [BLOCK] as whole numbers that sort as they do; experts that do not exist come after all others"""
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
