"""Mamba-1's recurrence in float32 torch (formulas in `arch/recurrent.py`).

A step goes through a row's tokens one after another: first through the cells since the last state, then through its own
tokens. So a token's result does not depend on how its sequence is split into steps.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenmill.arch.cache_parts import CHUNK
from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache, ScanInputs
from tokenmill.ops.reference.recurrent import RecurrentPlan, RecurrentRow, convolved, inputs_before


def convolve_values(
    projected: torch.Tensor, cache: RecurrentCache, plan: RecurrentPlan, args: RecurrentArgs
) -> torch.Tensor:
    """projected [T, v z] → silu of v's convolution [T, values]; nothing is cached yet"""
    inputs = projected[:, : args.spec.values_size]
    rows = ((row, inputs[row.begin : row.begin + row.num_tokens]) for row in plan.rows)
    return torch.cat([convolved(own, cache, plan, row, args) for row, own in rows]).to(projected.dtype)


def scan(inputs: ScanInputs, cache: RecurrentCache, plan: RecurrentPlan, args: RecurrentArgs) -> torch.Tensor:
    """→ gated outputs [T, values]; writes the tokens' cells and states"""
    weights, values = args.weights, inputs.convolved.float()
    assert weights.skip is not None
    steps = functional.softplus(inputs.steps.float() + weights.step_bias)
    out = torch.zeros_like(values)
    for row in plan.rows:
        _scan_row(inputs, steps, cache, plan, row, args, out)
    gate = inputs.projected[:, args.spec.values_size :].float() * args.spec.gate_scale
    return ((out + values * weights.skip) * functional.silu(gate) * args.spec.out_scale).to(inputs.projected.dtype)


def _scan_row(
    inputs: ScanInputs, steps: torch.Tensor, cache: RecurrentCache, plan: RecurrentPlan, row: RecurrentRow,
    args: RecurrentArgs, out: torch.Tensor,
) -> None:  # fmt: skip
    """Compute the outputs of one row's tokens, in place, and write their cells and states."""
    spec, rates, size = args.spec, args.weights.rates, plan.block_size
    own = inputs.projected[row.begin : row.begin + row.num_tokens, : spec.values_size]
    history = inputs_before(cache, plan, row, spec.kernel - 1, own)
    state = _state_before(cache, plan, row, args)
    for number in range(row.num_tokens):
        token, position = row.begin + number, row.start + number
        step, key = steps[token], inputs.keys[token].to(cache.keys.dtype)
        update = (step * inputs.convolved[token].float()).to(cache.updates.dtype)
        state = _advanced(state, rates, step, key, update)
        out[token] = inputs.queries[token].float() @ state
        entry, at = position // size, position % size
        block = row.cells[entry] if entry < len(row.cells) else 0
        if block:
            cache.conv_inputs[block, at] = own[number]
            cache.keys[block, 0, at], cache.updates[block, 0, at] = key, update
            cache.decays[block, at] = step
        chunk = position // CHUNK
        if (position + 1) % CHUNK == 0 and chunk < len(row.states) and row.states[chunk]:
            cache.states[row.states[chunk], 0] = state
            seen = torch.cat((history, own[: number + 1]))
            cache.tails[row.states[chunk]] = seen[len(seen) - (spec.kernel - 1) :]


def _state_before(cache: RecurrentCache, plan: RecurrentPlan, row: RecurrentRow, args: RecurrentArgs) -> torch.Tensor:
    """Return the state before a row's first token, [key_dim, values]."""
    spec, chunk_start = args.spec, row.start // CHUNK * CHUNK
    state = torch.zeros(spec.key_dim, spec.values_size, device=cache.states.device)
    if chunk_start:
        state = cache.states[row.states[chunk_start // CHUNK - 1], 0]
    for position in range(chunk_start, row.start):
        block, at = row.cells[position // plan.block_size], position % plan.block_size
        cell = cache.decays[block, at], cache.keys[block, 0, at], cache.updates[block, 0, at]
        state = _advanced(state, args.weights.rates, *cell)
    return state


def _advanced(
    state: torch.Tensor, rates: torch.Tensor, step: torch.Tensor, key: torch.Tensor, update: torch.Tensor
) -> torch.Tensor:
    return state * (rates * step).exp() + key.float().unsqueeze(1) * update.float()
