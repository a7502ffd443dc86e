"""Routed experts in torch: each token uses its top-k experts.

Tokens are grouped by expert, so that each expert's weights are read once per step. A token's results are added in the
order of expert ids, whatever the rest of the batch is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from tokenmill.arch.spec import Activation, RoutingSpec
from tokenmill.ops.interface import Dense, ExpertsWeight, Routing
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference.elementwise import act_mul, activate
from tokenmill.ops.reference.linear import multiply

Adapt = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, product of x and a matrix) → product of x and the adapted matrix; may overwrite its second argument"""
AdaptExpert = Callable[[int, torch.Tensor], tuple[Adapt, Adapt] | None]


def pack_experts(
    gate: RawTensor | None, up: RawTensor, down: RawTensor, dense: Dense, shared: object = None
) -> ExpertsWeight:
    """Pack the routed experts; the caller computes the shared expert."""
    ups = dense(up) if gate is None else torch.cat((dense(gate), dense(up)), dim=1)  # [experts, (2 *) inter, H]
    return ExpertsWeight(ups.shape[0], (ups, dense(down)), is_gated=gate is not None)


def route(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts with the highest scores, or those looked up by token id. Of equal scores the first is chosen,
    which `torch.topk` does not guarantee."""
    spec, logits = routing.spec, logits.float()
    scores = _scores(logits, spec.score)
    judged = logits if spec.is_bias_on_logits or spec.jitter is not None else scores
    ids = _top_k(judged, routing) if routing.chosen is None else routing.chosen
    weights = scores.gather(-1, ids) if spec.jitter is None else _shares_of_near(logits, ids, spec.jitter)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + spec.epsilon)
    weights = weights * spec.scale
    return weights if routing.expert_scales is None else weights * routing.expert_scales[ids], ids


def _top_k(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    biased = scores if routing.choice_bias is None else scores + routing.choice_bias
    if routing.spec.num_groups > 1:
        biased = biased.masked_fill(~_in_top_groups(biased, routing.spec), float("-inf"))
    return biased.sort(dim=-1, descending=True, stable=True).indices[..., : routing.num_active]


def _shares_of_near(logits: torch.Tensor, ids: torch.Tensor, jitter: float) -> torch.Tensor:
    """Return each choice's softmax over the experts left whose logits are near its own (`RoutingSpec.jitter`)."""
    left, shares = logits, []
    for chosen in torch.split(ids, 1, dim=-1):
        best = logits.gather(-1, chosen)
        is_far = (best - logits) / logits.abs().maximum(best) > 2 * jitter
        shares.append(torch.softmax(left.masked_fill(is_far, float("-inf")), dim=-1).gather(-1, chosen))
        left = left.scatter(-1, chosen, float("-inf"))
    return torch.cat(shares, dim=-1)


def _scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    match score:
        case "softmax":
            return torch.softmax(logits, dim=-1)
        case "sigmoid":
            return torch.sigmoid(logits)
        case _:
            return functional.softplus(logits).sqrt()


def _in_top_groups(scores: torch.Tensor, spec: RoutingSpec) -> torch.Tensor:
    """Return which experts belong to one of the best groups, bool [T, experts]."""
    group_size = scores.shape[-1] // spec.num_groups  # `view` can't infer it (-1) if there are no tokens
    groups = scores.view(*scores.shape[:-1], spec.num_groups, group_size)
    best = groups.sort(dim=-1, descending=True).values[..., : 1 if spec.group_score == "best" else 2].sum(-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[..., : spec.kept_groups]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
    return kept.unsqueeze(-1).expand_as(groups).flatten(-2)


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    packed: ExpertsWeight,
    activation: Activation,
    adapting: AdaptExpert | None = None,
) -> torch.Tensor:
    """`adapting`: for an expert and its tokens, the functions that apply adapters to its two products, if any"""
    gate_up, down = packed.packed
    order = ids.flatten().argsort(stable=True)  # (token, choice) pairs, sorted by expert
    tokens = order // ids.shape[1]
    sorted_weights = weights.flatten()[order].to(x.dtype).unsqueeze(1)
    counts = torch.bincount(ids.flatten(), minlength=packed.num_experts).tolist()
    out = torch.zeros_like(x)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            routed = tokens[start : start + count]
            adapt = None if adapting is None else adapting(expert, routed)
            inner = multiply(x[routed], gate_up[expert], _of(packed.gate_up_bias, expert))
            inner = inner if adapt is None else adapt[0](x[routed], inner)
            inner = act_mul(inner, activation) if packed.is_gated else activate(inner, activation)
            inner = inner if packed.gather_inner is None else packed.gather_inner(inner)
            result = multiply(inner, down[expert], _of(packed.down_bias, expert))
            result = result if adapt is None else adapt[1](inner, result)
            result = result if packed.gather_out is None else packed.gather_out(result)
            out.index_add_(0, routed, result * sorted_weights[start : start + count])
            start += count
    return out


def _of(biases: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if biases is None else biases[expert]
