"""Routed experts: each token goes through its k best experts. Tokens are grouped by expert, so that every chosen expert
is read once a step; a token's contributions are added in the order of expert ids, whatever the rest of the batch is.
"""

from __future__ import annotations

import torch

from tokenmill.arch.spec import Activation
from tokenmill.ops.interface import Dense, ExpertsWeight
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference.elementwise import act_mul
from tokenmill.ops.reference.linear import multiply


def pack_experts(gate: RawTensor, up: RawTensor, down: RawTensor, dense: Dense) -> ExpertsWeight:
    gate_up = torch.cat((dense(gate), dense(up)), dim=1)  # [experts, 2 * inter, H]
    return ExpertsWeight(gate_up.shape[0], (gate_up, dense(down)))


def route(logits: torch.Tensor, num_active: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts with the highest logits; of equal ones the first, where `topk` would take any."""
    weights, ids = torch.softmax(logits.float(), dim=-1).sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[..., :num_active], ids[..., :num_active]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


def experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: ExpertsWeight, activation: Activation
) -> torch.Tensor:
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
            inner = act_mul(multiply(x[mine], gate_up[expert]), activation)
            out.index_add_(0, mine, multiply(inner, down[expert]) * shares[start : start + count])
            start += count
    return out
