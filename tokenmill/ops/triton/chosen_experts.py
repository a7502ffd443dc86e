"""Experts of a few tokens, from the router's logits on, in two kernels:

    logits, x ─► act(gate) * up of each chosen expert ─► their downs, weighted and added

Nobody writes down who was chosen: a program finds the expert it works for in its token's logits, a few dozen steps, and
then streams many lines of that expert's matrices. There are about as many programs as the device holds at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.arch.spec import Activation, MoeSpec
from tokenmill.ops.interface import ExpertsWeight, LinearWeight
from tokenmill.ops.triton.activation import activate
from tokenmill.ops.triton.kernel import kernel
from tokenmill.ops.triton.norm import norm_and_multiply
from tokenmill.ops.triton.overlap import launch_options, let_next_begin, wait_for_previous

MAX_TOKENS = 4  # beyond, sorting the choices by expert pays
PROGRAMS = 660  # five for each multiprocessor of an H200
STRIP = 2  # lines of gate and up taken at a time
LINES = 4  # of down
LOWEST = tl.constexpr(-(2**62))


@triton.jit
def _places(logits, token, num_experts, BLOCK: tl.constexpr):
    """A number for each expert that is higher the higher its logit is, and among equals for the first."""
    experts = tl.arange(0, BLOCK)
    values = tl.load(logits + token * num_experts + experts, mask=experts < num_experts, other=float("-inf"))
    bits = values.to(tl.float32).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # whole numbers that sort as the floats do
    return ordered.to(tl.int64) * BLOCK + (BLOCK - 1 - experts)


@triton.jit
def _expert_at(place, BLOCK: tl.constexpr):
    return BLOCK - 1 - (place & (BLOCK - 1))


@triton.jit
def _logit_at(place, BLOCK: tl.constexpr):
    ordered = ((place - (place & (BLOCK - 1))) // BLOCK).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@kernel
def _open_experts(
    x, logits, gate_up, out, hidden, inter, num_experts, lines_each,
    K: tl.constexpr, KIND: tl.constexpr, STRIP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T * K, inter] = act(gate x) * up x"""
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)  # not before the logits are there: the next kernel reads them without waiting
    pair = tl.program_id(0)
    token, choice = pair // K, pair % K
    places = _places(logits, token, num_experts, BLOCK)
    place = tl.max(places, axis=0)
    for _ in range(choice):
        place = tl.max(tl.where(places < place, places, LOWEST), axis=0)
    expert = _expert_at(place, BLOCK)
    columns = tl.arange(0, WIDTH)
    inside = columns < hidden
    first = tl.program_id(1) * lines_each
    last = tl.minimum(first + lines_each, inter)
    lines = first + tl.arange(0, STRIP)
    source = gate_up + (expert * 2 * inter + lines)[:, None] * hidden + columns[None, :]
    is_there = (lines < last)[:, None] & inside[None, :]
    gate = tl.load(source, mask=is_there, other=0.0)
    up = tl.load(source + inter * hidden, mask=is_there, other=0.0)
    factors = tl.load(x + token * hidden + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    for start in range(0, lines_each, STRIP):
        following = source + (start + STRIP) * hidden
        is_next = (lines + start + STRIP < last)[:, None] & inside[None, :]
        next_gate = tl.load(following, mask=is_next, other=0.0)
        next_up = tl.load(following + inter * hidden, mask=is_next, other=0.0)
        gates = tl.sum(gate.to(tl.float32) * factors, axis=1)
        ups = tl.sum(up.to(tl.float32) * factors, axis=1)
        gated = (activate(gates, KIND) * ups).to(out.dtype.element_ty)
        tl.store(out + pair * inter + lines + start, gated, mask=lines + start < last)
        gate, up = next_gate, next_up


@kernel
def _close_experts(
    inner, logits, down, out, hidden, inter, num_experts,
    K: tl.constexpr, RENORMALIZE: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, hidden], LINES of one token a program; the first expert's are on their way before `inner` is known"""
    let_next_begin(OVERLAPS)
    token = tl.program_id(1)
    places = _places(logits, token, num_experts, BLOCK)
    place = tl.max(places, axis=0)
    highest = _logit_at(place, BLOCK)
    columns = tl.arange(0, WIDTH)
    inside = columns < inter
    lines = tl.program_id(0) * LINES + tl.arange(0, LINES)
    is_there = (lines < hidden)[:, None] & inside[None, :]
    source = down + lines[:, None] * inter + columns[None, :]
    found = tl.load(source + _expert_at(place, BLOCK) * hidden * inter, mask=is_there, other=0.0)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((LINES, WIDTH), tl.float32)
    whole = 0.0
    for choice in tl.static_range(K):
        share = tl.exp(_logit_at(place, BLOCK) - highest)
        whole += share
        factors = tl.load(inner + (token * K + choice) * inter + columns, mask=inside, other=0.0)
        factors = (factors.to(tl.float32) * share)[None, :]
        if choice + 1 < K:
            place = tl.max(tl.where(places < place, places, LOWEST), axis=0)
            following = tl.load(source + _expert_at(place, BLOCK) * hidden * inter, mask=is_there, other=0.0)
            sums += found.to(tl.float32) * factors
            found = following
        else:
            sums += found.to(tl.float32) * factors
    if not RENORMALIZE:
        whole = tl.sum(tl.exp(_logit_at(places, BLOCK) - highest), axis=0)
    tl.store(out + token * hidden + lines, (tl.sum(sums, axis=1) / whole).to(out.dtype.element_ty), mask=lines < hidden)


def chosen_experts(
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
    (num_tokens, hidden), inter = x.shape, down.shape[2]
    block, pairs = triton.next_power_of_2(packed.num_experts), num_tokens * num_active
    inner, out = x.new_empty(pairs, inter), torch.empty_like(x)
    each = _lines_each(inter, PROGRAMS // pairs)
    _open_experts[(pairs, triton.cdiv(inter, each))](
        x, logits, gate_up, inner, hidden, inter, packed.num_experts, each, num_active, activation, STRIP,
        triton.next_power_of_2(hidden), block, num_warps=4 if hidden <= 2048 else 8, **launch_options(),
    )  # fmt: skip
    _close_experts[(triton.cdiv(hidden, LINES), num_tokens)](
        inner, logits, down, out, hidden, inter, packed.num_experts, num_active, renormalize, LINES,
        triton.next_power_of_2(inter), block, num_warps=4 if inter <= 1024 else 8, **launch_options(),
    )  # fmt: skip
    return out


def add_norm_experts(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    router: LinearWeight,
    packed: ExpertsWeight,
    spec: MoeSpec,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """For a few tokens; None for others."""
    if not 0 < len(x) <= MAX_TOKENS:
        return None
    logits, normed, total = norm_and_multiply(x, residual, norm, eps, router.packed)
    renormalize, activation = spec.renormalize, spec.expert.activation
    return chosen_experts(normed, logits, packed, spec.num_active, activation, renormalize=renormalize), total


def _lines_each(num_lines: int, num_programs: int) -> int:
    """Of `num_lines` shared by so many programs, a multiple of a strip."""
    return triton.cdiv(triton.cdiv(num_lines, max(1, num_programs)), STRIP) * STRIP
