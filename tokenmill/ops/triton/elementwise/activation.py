"""Gated activations, act(gate) * up, in one pass; and rows times the sigmoid of their gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.arch.spec import Activation
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, next_power_of_2
from tokenmill.ops.triton.launch.pdl import launch_dependents, launch_options, wait_for_previous

_BLOCK = 1024
FUSED_KINDS = ("silu", "gelu", "gelu_tanh")  # available as an epilogue of products
LIMITED_KINDS = ("swiglu_oai", "silu_to_10")  # gates and ups are clamped before they are multiplied


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activate(gate, KIND: tl.constexpr):
    if KIND == "silu":
        return gate * tl.sigmoid(gate)
    if KIND == "relu":
        return tl.maximum(gate, 0.0)
    if KIND == "relu2":
        positive = tl.maximum(gate, 0.0)
        return positive * positive
    if KIND == "gelu_tanh":
        return 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """act(gate) * up"""
    if KIND == "swiglu_oai":
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    if KIND == "silu_to_10":
        gate, up = tl.minimum(gate, 10.0), tl.minimum(tl.maximum(up, -10.0), 10.0)
        return gate * tl.sigmoid(gate) * up
    return activate(gate, KIND) * up


@kernel
def _act_mul(gate_up, out, inter, KIND: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr) -> None:
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inter
    start = gate_up + row * 2 * inter + columns
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + inter, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inter + columns, gated(gate, up, KIND).to(out.dtype.element_ty), mask=inside)


@kernel
def _cut_act_mul(gate_up, out, inter, cutoff, KIND: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr) -> None:
    """One program per row."""
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < inter
    start = gate_up + row * 2 * inter + columns
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(gate, axis=0) / inter
    apart = tl.where(inside, gate - mean, 0.0)
    least = mean + tl.sqrt(tl.sum(apart * apart, axis=0) / inter) * cutoff
    kept = tl.maximum(gate - least, 0.0).to(gate_up.dtype.element_ty).to(tl.float32)
    up = tl.load(start + inter, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inter + columns, gated(kept, up, KIND).to(out.dtype.element_ty), mask=inside)


def cut_act_mul(gate_up: torch.Tensor, activation: Activation, cutoff: float) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    num_rows, inter = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, inter)
    if num_rows:
        block = next_power_of_2(inter)
        _cut_act_mul[(num_rows,)](
            gate_up, out, inter, cutoff, activation, block, num_warps=4 if block <= 4096 else 16, **launch_options()
        )
    return out


def act_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    num_rows, inter = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, inter)
    if num_rows:
        _act_mul[(num_rows, cdiv(inter, _BLOCK))](gate_up, out, inter, activation, _BLOCK, **launch_options())
    return out


@kernel
def _act(x, out, size, KIND: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr) -> None:
    launch_dependents(OVERLAPS)
    wait_for_previous(OVERLAPS)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    value = activate(tl.load(x + places, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(out + places, value.to(out.dtype.element_ty), mask=inside)


def act(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply an activation elementwise, for MLPs without a gate."""
    out = torch.empty_like(x)
    if x.numel():
        _act[(cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), activation, _BLOCK, **launch_options())
    return out


@kernel
def _gate_rows(y, x, gate, out, size, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr) -> None:
    launch_dependents(OVERLAPS)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    factors = tl.load(gate + columns, mask=inside, other=0.0)
    wait_for_previous(OVERLAPS)
    at = tl.program_id(0).to(tl.int64) * size + columns
    product = tl.sum(tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factors, axis=0)
    share = tl.sigmoid(product).to(y.dtype.element_ty).to(tl.float32)
    values = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (values * share).to(out.dtype.element_ty), mask=inside)


def gate_rows(y: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiply rows by the sigmoid of their gates; one program per row, with a fixed order of summation."""
    y, x = y.contiguous(), x.contiguous()
    num_rows, size = y.shape
    out = torch.empty_like(y)
    if num_rows:
        block = next_power_of_2(size)
        _gate_rows[(num_rows,)](y, x, gate, out, size, block, num_warps=4 if block <= 4096 else 8, **launch_options())
    return out
