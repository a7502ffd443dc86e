"""Routed experts: each token goes through its k best experts. Tokens are grouped by expert, so that every chosen expert
is read once a step; a token's contributions are added in the order of expert ids, whatever the rest of the batch is.
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
"""(x, its product with a matrix) → the adapted matrix's product; may change the product"""
AdaptExpert = Callable[[int, torch.Tensor], tuple[Adapt, Adapt] | None]


def pack_experts(
    gate: RawTensor | None, up: RawTensor, down: RawTensor, dense: Dense, shared: object = None
) -> ExpertsWeight:
    """The shared expert is left to the caller."""
    ups = dense(up) if gate is None else torch.cat((dense(gate), dense(up)), dim=1)  # [experts, (2 *) inter, H]
    return ExpertsWeight(ups.shape[0], (ups, dense(down)), is_gated=gate is not None)


def route(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts with the highest scores, of equal ones the first, where `topk` would take any; or those that
    were looked up."""
    spec, scores = routing.spec, _scores(logits.float(), routing.spec.score)
    ids = _best(scores, routing) if routing.chosen is None else routing.chosen
    weights = scores.gather(-1, ids)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + spec.epsilon)
    weights = weights * spec.scale
    return weights if routing.expert_scales is None else weights * routing.expert_scales[ids], ids


def _best(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    wanted = scores if routing.choice_bias is None else scores + routing.choice_bias
    if routing.spec.num_groups > 1:
        wanted = wanted.masked_fill(~_kept(wanted, routing.spec), float("-inf"))
    return wanted.sort(dim=-1, descending=True, stable=True).indices[..., : routing.num_active]


def _scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    match score:
        case "softmax":
            return torch.softmax(logits, dim=-1)
        case "sigmoid":
            return torch.sigmoid(logits)
        case _:
            return functional.softplus(logits).sqrt()


def _kept(wanted: torch.Tensor, spec: RoutingSpec) -> torch.Tensor:
    """bool [T, experts]: those whose group is among the best"""
    each = wanted.shape[-1] // spec.num_groups  # not -1: there may be no tokens at all
    groups = wanted.view(*wanted.shape[:-1], spec.num_groups, each)
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
    """`adapting`: for an expert and its tokens, what adapters add to both of its products"""
    gate_up, down = packed.packed
    order = ids.flatten().argsort(stable=True)  # (token, choice) pairs, expert by expert
    tokens = order // ids.shape[1]
    shares = weights.flatten()[order].to(x.dtype).unsqueeze(1)
    counts = torch.bincount(ids.flatten(), minlength=packed.num_experts).tolist()
    out = torch.zeros_like(x)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            mine = tokens[start : start + count]
            added = None if adapting is None else adapting(expert, mine)
            inner = multiply(x[mine], gate_up[expert], _of(packed.gate_up_bias, expert))
            inner = inner if added is None else added[0](x[mine], inner)
            inner = act_mul(inner, activation) if packed.is_gated else activate(inner, activation)
            inner = inner if packed.gather_inner is None else packed.gather_inner(inner)
            result = multiply(inner, down[expert], _of(packed.down_bias, expert))
            result = result if added is None else added[1](inner, result)
            result = result if packed.gather_out is None else packed.gather_out(result)
            out.index_add_(0, mine, result * shares[start : start + count])
            start += count
    return out


def _of(biases: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if biases is None else biases[expert]
