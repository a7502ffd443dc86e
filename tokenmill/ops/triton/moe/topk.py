"""Top-k routing: the experts with the k highest scores of a token, for all variants of `RoutingSpec`.

`route` stores weights and ids of all tokens, one program per token. The GEMV kernels for few tokens don't need it: a
program finds its expert in its token's logits (`choice_of`), in a few dozen steps of a warp. Logits are compared as
integers, for which a maximum is two instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.interface import Routing
from tokenmill.ops.triton.launch.kernel import kernel, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous


@triton.jit
def _scores(logits, SCORE: tl.constexpr):
    """Return the scores of float32 logits [BLOCK]; -inf beyond the last expert."""
    if SCORE == "softmax":
        exps = tl.exp(logits - tl.max(logits, axis=0))
        scores = exps / tl.sum(exps, axis=0)
    elif SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:  # the square root of softplus; softplus(x) is x for large x
        scores = tl.sqrt(tl.where(logits > 20.0, logits, tl.log(1.0 + tl.exp(tl.minimum(logits, 20.0)))))
    return scores


@triton.jit
def _best_of(biased, experts, BLOCK: tl.constexpr):
    """Return the highest score and its index, of equal ones the first."""
    best = tl.max(biased, axis=0)
    return best, tl.min(tl.where(biased == best, experts, BLOCK - 1), axis=0)


@triton.jit
def _best_groups(
    biased, experts, group_size, BLOCK: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TWO_BEST: tl.constexpr
):  # fmt: skip
    """Return the scores with -inf for experts whose groups are not among the best."""
    numbers = experts // group_size
    group_scores = tl.full((BLOCK,), float("-inf"), tl.float32)  # indexed by group
    for group in tl.static_range(GROUPS):
        members = tl.where(numbers == group, biased, float("-inf"))
        score, first = _best_of(members, experts, BLOCK)
        if TWO_BEST:
            score += tl.max(tl.where(experts == first, float("-inf"), members), axis=0)
        group_scores = tl.where(experts == group, score, group_scores)
    kept = experts < 0
    for _ in tl.static_range(KEPT):
        _, group = _best_of(group_scores, experts, BLOCK)
        kept = kept | (numbers == group)
        group_scores = tl.where(experts == group, float("-inf"), group_scores)
    return tl.where(kept, biased, float("-inf"))


@triton.jit
def _share_of_near(logits, is_left, choice, jitter):
    """Return the softmax of the logit `choice` over the logits left that are near it (`RoutingSpec.jitter`)."""
    is_far = (choice - logits) / tl.maximum(tl.abs(logits), choice) > 2 * jitter
    return 1.0 / tl.sum(tl.where(is_left & (is_far == 0), tl.exp(logits - choice), 0.0), axis=0)


@kernel
def _route(
    logits, choice_bias, expert_scales, looked_up, weights, ids, num_experts, scale, epsilon, jitter, group_size,
    K: tl.constexpr, SHARED: tl.constexpr, K_PADDED: tl.constexpr, BLOCK: tl.constexpr, SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALES: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, TWO_BEST: tl.constexpr, ARE_LOOKED_UP: tl.constexpr, BY_LOGIT: tl.constexpr,
    HAS_JITTER: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """`looked_up` int64 [T, K]: given experts, for which only the weights are computed; `BY_LOGIT`: experts are chosen
    by their logits instead of their scores"""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    indices = tl.arange(0, K_PADDED)
    is_expert = experts < num_experts
    values = tl.load(logits + token * num_experts + experts, mask=is_expert, other=float("-inf"))
    values = values.to(tl.float32)
    scores = _scores(values, SCORE)
    biased = values if BY_LOGIT else scores
    if HAS_BIAS:
        biased += tl.load(choice_bias + experts, mask=is_expert, other=0.0)
    biased = tl.where(is_expert, biased, float("-inf"))
    if GROUPS > 1:
        biased = _best_groups(biased, experts, group_size, BLOCK, GROUPS, KEPT, TWO_BEST)
    chosen = tl.zeros((K_PADDED,), tl.float32)
    chosen_ids = tl.zeros((K_PADDED,), tl.int64)
    for index in tl.static_range(K):
        if ARE_LOOKED_UP:
            expert = tl.load(looked_up + token * K + index)
        else:
            _, expert = _best_of(biased, experts, BLOCK)
        if HAS_JITTER:
            choice = tl.sum(tl.where(experts == expert, values, 0.0), axis=0)
            score = _share_of_near(values, biased > float("-inf"), choice, jitter)
        else:
            score = tl.sum(tl.where(experts == expert, scores, 0.0), axis=0)
        chosen = tl.where(indices == index, score, chosen)
        chosen_ids = tl.where(indices == index, expert.to(tl.int64), chosen_ids)
        biased = tl.where(experts == expert, float("-inf"), biased)
    if RENORMALIZE:
        chosen = chosen / (tl.sum(chosen, axis=0) + epsilon)
    chosen *= scale
    if HAS_SCALES:
        chosen *= tl.load(expert_scales + chosen_ids, mask=indices < K, other=0.0)
    if SHARED:
        chosen = tl.where(indices < K, chosen, 1.0)
        chosen_ids = tl.where(indices < K, chosen_ids, (num_experts + indices - K).to(tl.int64))
    is_choice = indices < K + SHARED
    tl.store(weights + token * (K + SHARED) + indices, chosen, mask=is_choice)
    tl.store(ids + token * (K + SHARED) + indices, chosen_ids, mask=is_choice)


def route(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    spec, num_active, num_shared = routing.spec, routing.num_active, routing.num_shared
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, num_active + num_shared, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, num_active + num_shared, dtype=torch.int64, device=logits.device)
    bias, scales, chosen = routing.choice_bias, routing.expert_scales, routing.chosen
    if num_tokens:
        _route[(num_tokens,)](
            logits.contiguous(), weights if bias is None else bias, weights if scales is None else scales,
            ids if chosen is None else chosen.contiguous(), weights, ids,
            num_experts, spec.scale, spec.epsilon, spec.jitter or 0.0, num_experts // spec.num_groups,
            num_active, num_shared, next_power_of_2(num_active + num_shared), next_power_of_2(num_experts),
            spec.score, spec.renormalize, bias is not None, scales is not None, spec.num_groups, spec.kept_groups,
            spec.group_score == "two_best", chosen is not None, spec.is_bias_on_logits or spec.jitter is not None,
            spec.jitter is not None,
            num_warps=1, **launch_options(),
        )  # fmt: skip
    return weights, ids


LOWEST = tl.constexpr(-(2**31))


@triton.jit
def ordered_logits(logits, token, num_experts, BLOCK: tl.constexpr):
    """Load logits [BLOCK] as integers of the same order; experts that do not exist are lowest."""
    experts = tl.arange(0, BLOCK)
    # Bypass the L1 cache, which may hold stale logits: the down kernel reads them before it waits.
    at = logits + token * num_experts + experts
    values = tl.load(at, mask=experts < num_experts, other=0.0, cache_modifier=".cg")
    bits = values.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(experts < num_experts, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LOWEST)


@triton.jit
def logit_of(ordered):
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def next_choice(left, BLOCK: tl.constexpr):
    """Return the best remaining expert, of equal ones the first; its logit; and the remaining ones without it."""
    experts = tl.arange(0, BLOCK)
    best = tl.max(left, axis=0)
    expert = tl.min(tl.where(left == best, experts, BLOCK), axis=0)
    return expert.to(tl.int64), logit_of(best), tl.where(experts == expert, LOWEST, left)


@triton.jit
def choice_of(logits, token, choice, num_experts, K: tl.constexpr, BLOCK: tl.constexpr):
    """Return the expert that is a token's `choice`-th best."""
    expert, _, left = next_choice(ordered_logits(logits, token, num_experts, BLOCK), BLOCK)
    if K == 2:  # ptxas 12.8 turns a loop of at most one iteration into a condition, which breaks the reduction's mask
        second, _, left = next_choice(left, BLOCK)
        expert = tl.where(choice == 1, second, expert)
    else:
        for _ in range(choice):
            expert, _, left = next_choice(left, BLOCK)
    return expert
