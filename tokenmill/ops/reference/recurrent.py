"""Recurrent mixers in float32 torch, in chunks of 64 absolute positions (formulas in `arch/recurrent.py`).

A token's result must not depend on how its sequence is split into steps. So a chunk is always computed with the same
shapes, with zeros for tokens that do not exist yet. Tokens of earlier steps are read from their cells; those of this
step are solved one after another, each from 64 products with the updates before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from tokenmill.arch.cache_parts import CHUNK
from tokenmill.arch.recurrent import OutputNorm, Recurrent
from tokenmill.ops.batch import ForwardBatch
from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache


class RecurrentRow(NamedTuple):
    """The tokens of one row in a step."""

    begin: int  # index of its first token in the step
    num_tokens: int
    start: int  # position of its first token
    cells: list[int]  # its block table of cells
    states: list[int]  # its state slots; entry e is the state after 64 * (e + 1) tokens


@dataclass(frozen=True)
class RecurrentPlan:
    rows: list[RecurrentRow]
    block_size: int


def plan_recurrent(batch: ForwardBatch, cells: int, states: int) -> RecurrentPlan:
    """`cells`, `states`: the numbers of the two cache groups."""
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    tables = [batch.groups[group].block_tables.tolist() for group in (cells, states)]
    rows = [
        RecurrentRow(starts[row], starts[row + 1] - starts[row], end - (starts[row + 1] - starts[row]), *tables_of_row)
        for row, (end, *tables_of_row) in enumerate(zip(contexts, *tables, strict=True))
    ]
    return RecurrentPlan(rows, batch.block_size)


def recurrent(projected: torch.Tensor, cache: RecurrentCache, plan: RecurrentPlan, args: RecurrentArgs) -> torch.Tensor:
    """Stacked projections [T, q k v z (b) a] → normed and gated outputs [T, values]"""
    spec = args.spec
    parts = dict(zip(*zip(*spec.projected_parts, strict=True), strict=True))
    sizes = [spec.conv_size, *(size for name, size in parts.items() if name not in "qkv")]
    inputs, gate, *steps = torch.split(projected, sizes, dim=-1)
    out = torch.zeros(len(projected), spec.values_size, device=projected.device)
    for row in plan.rows:
        own = slice(row.begin, row.begin + row.num_tokens)
        tokens = _tokens(convolved(inputs[own], cache, plan, row, args), [step[own].float() for step in steps], args)
        out[own] = _RowChunks(cache, plan, row, spec, tokens, inputs[own]).compute()
        if args.weights.skip is not None:
            values = tokens.v.view(row.num_tokens, spec.value_heads, spec.value_dim)
            out[own] += (values * args.weights.skip.view(-1, 1)).flatten(1)
    return _gated(out, gate.float() * spec.gate_scale, args).mul_(spec.out_scale).to(projected.dtype)


# ── before and after the recurrence ────────────────────────────────────────────────────────────────────


def convolved(
    inputs: torch.Tensor, cache: RecurrentCache, plan: RecurrentPlan, row: RecurrentRow, args: RecurrentArgs
) -> torch.Tensor:
    """Return silu of the convolution, float32 [count, channels]; taps are added in order, the oldest first."""
    taps, count = args.spec.kernel, len(inputs)
    seen = torch.cat((inputs_before(cache, plan, row, taps - 1, inputs), inputs)).float()
    total = torch.zeros(inputs.shape, device=inputs.device)
    if args.weights.conv_bias is not None:
        total += args.weights.conv_bias
    for tap in range(taps):
        total += args.weights.conv[:, tap] * seen[tap : tap + count]
    return functional.silu(total)


def inputs_before(
    cache: RecurrentCache, plan: RecurrentPlan, row: RecurrentRow, number: int, like: torch.Tensor
) -> torch.Tensor:
    """Read the `number` inputs before a row's first token: from cells within its chunk, else from the state's tail."""
    found = []
    chunk_start = row.start // CHUNK * CHUNK
    for position in range(row.start - number, row.start):
        if position < 0:
            found.append(torch.zeros_like(like[0]))
        elif position >= chunk_start:
            found.append(cache.conv_inputs[row.cells[position // plan.block_size], position % plan.block_size])
        else:
            found.append(cache.tails[row.states[row.start // CHUNK - 1], number - (chunk_start - position)])
    return torch.stack(found) if found else like[:0]


class Tokens(NamedTuple):
    """The inputs of the recurrence for T tokens, float32."""

    q: torch.Tensor  # [T, key_heads, key_dim]
    k: torch.Tensor
    v: torch.Tensor  # [T, value_heads, value_dim]
    g: torch.Tensor  # [T, value_heads], or [T, value_heads, key_dim]: log of the decay
    strength: torch.Tensor  # [T, value_heads]: β, or dt


def _tokens(x: torch.Tensor, steps: list[torch.Tensor], args: RecurrentArgs) -> Tokens:
    spec, weights, count = args.spec, args.weights, len(x)
    q, k, v = torch.split(x, [spec.keys_size, spec.keys_size, spec.values_size], dim=-1)
    q, k = (part.view(count, spec.key_heads, spec.key_dim) for part in (q, k))
    v = v.view(count, spec.value_heads, spec.value_dim)
    a, rates = steps[-1] * spec.step_scale + weights.step_bias, weights.rates
    if spec.has_channel_decays:
        a, rates = a.view(count, spec.value_heads, spec.key_dim), rates.unsqueeze(-1)
    dt = functional.softplus(a)
    if spec.step_limits is not None:
        dt = dt.clamp(*spec.step_limits)
    if spec.rule == "ssd":
        return Tokens(q, k, v, rates * dt, dt)
    g = rates * dt if spec.lowest_decay is None else spec.lowest_decay * torch.sigmoid(-rates * a)
    return Tokens(_unit(q) * spec.key_dim**-0.5, _unit(k), v, g, torch.sigmoid(steps[0]) * spec.strength_scale)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _gated(x: torch.Tensor, gate: torch.Tensor, args: RecurrentArgs) -> torch.Tensor:
    """[T, values] each, float32"""
    norm, weight = args.spec.norm, args.weights.norm
    if norm is None or weight is None:
        return x * functional.silu(gate)
    if norm.gates_first:
        return _normed(x * functional.silu(gate), norm, weight, args.weights.eps)
    factors = functional.silu(gate) if norm.gate == "silu" else torch.sigmoid(gate)
    return _normed(x, norm, weight, args.weights.eps) * factors


def _normed(x: torch.Tensor, norm: OutputNorm, weight: torch.Tensor, eps: float) -> torch.Tensor:
    parts = x.view(len(x), norm.groups, -1)
    parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)
    return (parts * weight).flatten(1) if norm.is_shared else parts.flatten(1) * weight


# ── the recurrence ─────────────────────────────────────────────────────────────────────────────────────


class _RowChunks:
    """Computes the chunks of one row's tokens in order."""

    def __init__(
        self,
        cache: RecurrentCache,
        plan: RecurrentPlan,
        row: RecurrentRow,
        spec: Recurrent,
        tokens: Tokens,
        inputs: torch.Tensor,
    ) -> None:
        self.cache, self.block_size, self.row, self.spec = cache, plan.block_size, row, spec
        self.tokens, self.inputs = tokens, inputs
        self.history = inputs_before(cache, plan, row, spec.kernel - 1, inputs)
        self.decay_shape = (spec.key_dim,) if spec.has_channel_decays else ()
        slot = row.states[row.start // CHUNK - 1] if row.start >= CHUNK else 0
        shape = (spec.value_heads, spec.key_dim, spec.value_dim)
        self.state = cache.states[slot] if slot else torch.zeros(shape, device=inputs.device)

    def compute(self) -> torch.Tensor:
        """Compute all chunks of the row, [count, values]."""
        row, parts = self.row, []
        position, end = row.start, row.start + row.num_tokens
        while position < end:
            stop = min(end, (position // CHUNK + 1) * CHUNK)
            parts.append(self._chunk(position, stop))
            position = stop
        return torch.cat(parts)

    def _chunk(self, first: int, stop: int) -> torch.Tensor:
        """Compute positions [first, stop) of one chunk, [stop - first, values], and write their cells and state."""
        spec, own = self.spec, slice(first - self.row.start, stop - self.row.start)
        at, to = first % CHUNK, first % CHUNK + stop - first
        keys, updates, decays = self._earlier_cells(first)
        queries = torch.zeros_like(keys)
        queries[:, at:to] = self.tokens.q[own].transpose(0, 1)
        keys[:, at:to] = self.tokens.k[own].transpose(0, 1).to(self.cache.keys.dtype).float()
        for number in range(at, to):
            before = decays[:, number - 1] if number else torch.zeros_like(decays[:, 0])
            decays[:, number] = before + self.tokens.g[self._index(first, number - at)]
        repeats = spec.value_heads // spec.key_heads
        all_keys, all_queries = (  # [value_heads, 64, D]
            part.repeat(repeats, 1, 1) if spec.is_tiled else part.repeat_interleave(repeats, 0)
            for part in (keys, queries)
        )
        self._solve(first, at, to, all_keys, updates, decays)
        out = self._outputs(all_queries, all_keys, updates, decays)[:, at:to]
        self._write_cells(first, at, to, keys, updates, decays)
        if to == CHUNK:
            self._next_state(stop, all_keys, updates, decays)
        return out.transpose(0, 1).flatten(1)

    def _index(self, first: int, offset: int) -> int:
        """Return the index of position first + offset among the row's tokens of this step."""
        return first - self.row.start + offset

    def _earlier_cells(self, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read keys [key_heads, 64, D], updates [value_heads, 64, D] and decays [value_heads, 64] of the chunk's tokens
        before this step; zeros for later ones."""
        spec, cache, device = self.spec, self.cache, self.state.device
        keys = torch.zeros(spec.key_heads, CHUNK, spec.key_dim, device=device)
        updates = torch.zeros(spec.value_heads, CHUNK, spec.value_dim, device=device)
        decays = torch.zeros(spec.value_heads, CHUNK, *self.decay_shape, device=device)
        chunk_start = first // CHUNK * CHUNK
        for position in range(chunk_start, first):
            block, token = self.row.cells[position // self.block_size], position % self.block_size
            at = position - chunk_start
            keys[:, at] = cache.keys[block, :, token].float()
            updates[:, at] = cache.updates[block, :, token].float()
            decays[:, at] = self._cell_decays(block, token)
        return keys, updates, decays

    def _solve(
        self, first: int, at: int, to: int, keys: torch.Tensor, updates: torch.Tensor, decays: torch.Tensor
    ) -> None:
        """Compute the updates of positions [at, to) of the chunk, in place."""
        tokens, dtype = self.tokens, self.cache.updates.dtype
        if self.spec.rule == "ssd":
            own = slice(self._index(first, 0), self._index(first, to - at))
            fresh = tokens.v[own] * tokens.strength[own].unsqueeze(-1)
            updates[:, at:to] = fresh.transpose(0, 1).to(dtype).float()
            return
        recalled, products = self._from_state(keys, decays), _products(keys, keys, decays, diagonal=-1)
        for number in range(at, to):
            index = self._index(first, number - at)
            seen = (products[:, number : number + 1] @ updates).squeeze(1)  # [value_heads, value_dim]
            fresh = (tokens.v[index] - recalled[:, number] - seen) * tokens.strength[index].unsqueeze(-1)
            updates[:, number] = fresh.to(dtype).float()

    def _outputs(
        self, queries: torch.Tensor, keys: torch.Tensor, updates: torch.Tensor, decays: torch.Tensor
    ) -> torch.Tensor:
        """[value_heads, 64, value_dim]"""
        return self._from_state(queries, decays) + _products(queries, keys, decays, diagonal=0) @ updates

    def _from_state(self, vectors: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
        """Multiply vectors [heads, 64, D] by the state before the chunk, decayed up to each token."""
        if self.spec.has_channel_decays:
            return (vectors * decays.exp()) @ self.state
        return (vectors @ self.state) * decays.exp().unsqueeze(-1)

    def _per_channel(self, decays: torch.Tensor) -> torch.Tensor:
        """Return decays as factors of vectors [heads, 64, D]."""
        return decays if self.spec.has_channel_decays else decays.unsqueeze(-1)

    def _cell_decays(self, block: int, token: int) -> torch.Tensor:
        decays = self.cache.decays[block]
        return decays[:, token] if self.spec.has_channel_decays else decays[token]

    def _write_cells(
        self, first: int, at: int, to: int, keys: torch.Tensor, updates: torch.Tensor, decays: torch.Tensor
    ) -> None:
        cache, chunk_start = self.cache, first - at
        for number in range(at, to):
            position = chunk_start + number
            entry, token = position // self.block_size, position % self.block_size
            block = self.row.cells[entry] if entry < len(self.row.cells) else 0
            if block:
                cache.conv_inputs[block, token] = self.inputs[self._index(first, number - at)]
                cache.keys[block, :, token] = keys[:, number].to(cache.keys.dtype)
                cache.updates[block, :, token] = updates[:, number].to(cache.updates.dtype)
                self._cell_decays(block, token).copy_(decays[:, number])

    def _next_state(self, end: int, keys: torch.Tensor, updates: torch.Tensor, decays: torch.Tensor) -> None:
        """Compute the state after the chunk that ends at position `end`; cache it if the table has a slot for it."""
        last = decays[:, -1:]
        kept = keys * self._per_channel((last - decays).exp())
        faded = last.exp().transpose(1, 2) if self.spec.has_channel_decays else last.exp().unsqueeze(-1)
        self.state = self.state * faded + kept.transpose(1, 2) @ updates
        entry = end // CHUNK - 1
        slot = self.row.states[entry] if entry < len(self.row.states) else 0
        if slot:
            self.cache.states[slot] = self.state
            number = self.spec.kernel - 1
            seen = torch.cat((self.history, self.inputs[: end - self.row.start]))
            self.cache.tails[slot] = seen[len(seen) - number :]


def _products(left: torch.Tensor, right: torch.Tensor, decays: torch.Tensor, diagonal: int) -> torch.Tensor:
    """Return left_t·right_j e^{G_t - G_j} [heads, 64, 64] of vectors [heads, 64, D], see `_pairwise`."""
    if decays.dim() == 2:
        return (left @ right.transpose(1, 2)) * _pairwise(decays, diagonal)
    sees = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decays.device).tril(diagonal)
    differences = (decays.unsqueeze(2) - decays.unsqueeze(1)).masked_fill(~sees.unsqueeze(-1), float("-inf"))
    return torch.einsum("htc,hjc,htjc->htj", left, right, differences.exp())


def _pairwise(decays: torch.Tensor, diagonal: int) -> torch.Tensor:
    """Return e^{G_t - G_j} [heads, 64, 64] for j < t (diagonal -1) or j <= t (0), else 0."""
    differences = decays.unsqueeze(2) - decays.unsqueeze(1)
    sees = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decays.device).tril(diagonal)
    return differences.masked_fill(~sees, float("-inf")).exp()
