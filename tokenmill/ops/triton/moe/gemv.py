"""Experts of a few tokens, from the router's logits on, in two kernels:

    logits, x ─► act(gate) * up of each chosen expert ─► their downs, weighted and added

Nobody writes down who was chosen: a program finds the expert it works for in its token's logits, a few dozen steps, and
then streams lines of that expert's matrices. A program is a single warp where it can be, and there are about as many
as the device holds at once.
"""

from __future__ import annotations

import torch
import triton.language as tl

from tokenmill.arch.spec import Activation, MoeSpec
from tokenmill.ops.interface import ExpertsWeight, LinearWeight
from tokenmill.ops.triton.elementwise.activation import activate
from tokenmill.ops.triton.elementwise.norm import norm_and_multiply
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.moe.gemv_int import moe_gemv_int
from tokenmill.ops.triton.moe.select import ExpertsKind
from tokenmill.ops.triton.moe.topk_choice import choice_of, logit_of, next_choice, ordered_logits
from tokenmill.ops.triton.quant.quantized import PackedIntMatrix

LINES = 2  # of down that a program computes


@kernel
def _moe_gemv_up(
    x, logits, gate_up, out, hidden, inter, num_experts, lines_each,
    K: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T * K, inter] = act(gate x) * up x"""
    wait_for_previous(OVERLAPS)
    launch_dependents(OVERLAPS)  # not before the logits are there: the next kernel reads them without waiting
    pair = tl.program_id(0)
    token, choice = pair // K, pair % K
    columns = tl.arange(0, WIDTH)
    inside = columns < hidden
    factors = tl.load(x + token * hidden + columns, mask=inside, other=0.0).to(tl.float32)
    expert = choice_of(logits, token, choice, num_experts, K, BLOCK)
    first = tl.program_id(1) * lines_each
    last = tl.minimum(first + lines_each, inter)
    source = gate_up + (expert * 2 * inter + first) * hidden + columns
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + inter * hidden, mask=inside, other=0.0)
    for line in range(first, last):
        source += hidden
        is_next = inside & (columns * 0 + line + 1 < last)
        next_gate = tl.load(source, mask=is_next, other=0.0)
        next_up = tl.load(source + inter * hidden, mask=is_next, other=0.0)
        gates = tl.sum(gate.to(tl.float32) * factors, axis=0)
        ups = tl.sum(up.to(tl.float32) * factors, axis=0)
        tl.store(out + pair * inter + line, (activate(gates, KIND) * ups).to(out.dtype.element_ty))
        gate, up = next_gate, next_up


@kernel
def _moe_gemv_down(
    inner, logits, down, out, hidden, inter, num_experts,
    K: tl.constexpr, RENORMALIZE: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, hidden], LINES of one token a program; the first experts' are on their way before `inner` is known"""
    launch_dependents(OVERLAPS)
    token = tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    inside = columns < inter
    lines = tl.program_id(0) * LINES + tl.arange(0, LINES)
    is_there = (lines < hidden)[:, None] & inside[None, :]
    source = down + lines[:, None] * inter + columns[None, :]
    ordered = ordered_logits(logits, token, num_experts, BLOCK)
    expert, highest, left = next_choice(ordered, BLOCK)
    part, logit = tl.load(source + expert * hidden * inter, mask=is_there, other=0.0), highest
    second, second_logit = part, logit
    if K > 1:
        expert, second_logit, left = next_choice(left, BLOCK)
        second = tl.load(source + expert * hidden * inter, mask=is_there, other=0.0)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((LINES, WIDTH), tl.float32)
    whole = 0.0
    for choice in tl.static_range(K):
        third, third_logit = second, second_logit
        if choice + 2 < K:
            expert, third_logit, left = next_choice(left, BLOCK)
            third = tl.load(source + expert * hidden * inter, mask=is_there, other=0.0)
        share = tl.exp(logit - highest)
        whole += share
        factors = tl.load(inner + (token * K + choice) * inter + columns, mask=inside, other=0.0)
        sums += part.to(tl.float32) * (factors.to(tl.float32) * share)[None, :]
        part, logit, second, second_logit = second, second_logit, third, third_logit
    if not RENORMALIZE:
        shares = tl.where(tl.arange(0, BLOCK) < num_experts, tl.exp(logit_of(ordered) - highest), 0.0)
        whole = tl.sum(shares, axis=0)
    tl.store(out + token * hidden + lines, (tl.sum(sums, axis=1) / whole).to(out.dtype.element_ty), mask=lines < hidden)


def moe_gemv(
    x: torch.Tensor,
    logits: torch.Tensor,
    packed: ExpertsWeight,
    num_active: int,
    activation: Activation,
    *,
    renormalize: bool,
) -> torch.Tensor:
    """x [T, H], router logits [T, experts] → weighted sum of the chosen experts [T, H]"""
    gate_up, down = packed.packed
    x, logits = x.contiguous(), logits.contiguous()
    if isinstance(gate_up, PackedIntMatrix):
        return moe_gemv_int(x, logits, gate_up, down, num_active, activation, renormalize=renormalize)
    (num_tokens, hidden), inter = x.shape, down.shape[2]
    block, pairs = next_power_of_2(packed.num_experts), num_tokens * num_active
    inner, out = x.new_empty(pairs, inter), torch.empty_like(x)
    each = cdiv(inter, max(1, capabilities_of(x.device).tuning.moe_gemv_programs // pairs))
    wide, wide_inner = next_power_of_2(hidden), next_power_of_2(inter)
    _moe_gemv_up[(pairs, cdiv(inter, each))](
        x, logits, gate_up, inner, hidden, inter, packed.num_experts, each, num_active, activation, wide, block,
        num_warps=_warps_for(wide, 2048), **launch_options(),
    )  # fmt: skip
    _moe_gemv_down[(cdiv(hidden, LINES), num_tokens)](
        inner, logits, down, out, hidden, inter, packed.num_experts, num_active, renormalize, LINES, wide_inner, block,
        num_warps=_warps_for(wide_inner, 1024), **launch_options(),
    )  # fmt: skip
    return out


def kind_of(packed: ExpertsWeight) -> ExpertsKind:
    """The form of the experts' matrices"""
    kinds = {type(matrix) for matrix in packed.packed}
    return "plain" if kinds == {torch.Tensor} else "int" if kinds == {PackedIntMatrix} else "mixed"


def add_norm_experts(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    router: LinearWeight,
    packed: ExpertsWeight,
    spec: MoeSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A few rows x, residual [T, H] → the chosen experts of rms_norm(x + residual), and x + residual"""
    logits, normed, total = norm_and_multiply(x, residual, norm, eps, router.packed)
    renormalize, activation = spec.renormalize, spec.expert.activation
    return moe_gemv(normed, logits, packed, spec.num_active, activation, renormalize=renormalize), total


def _warps_for(width: int, each: int) -> int:
    """One where that is enough: its threads need no barrier to add up."""
    return max(1, min(8, width // each))
