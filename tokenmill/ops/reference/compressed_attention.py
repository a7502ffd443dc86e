"""Attention over a sliding window and compressed entries, in plain torch, row by row.

    1  write the step's keys, and the inputs of future entries, to the cache
    2  compute the entries that the step's tokens complete and write them, a part to the slot of each of their tokens
    3  attend: a query sees the keys of its window and the complete entries before it

Rotated keys are also the values, so the result is rotated back by the query's angle; then the contribution of a key
depends on its distance only.
"""

from __future__ import annotations

import torch

from tokenmill.arch.compressed import Compression
from tokenmill.arch.indexer import Indexer
from tokenmill.ops.compressed import CachedField, EntryWeights, WindowedInputs
from tokenmill.ops.reference.elementwise import rms_norm


def windowed_attend(inputs: WindowedInputs) -> torch.Tensor:
    """→ [T, heads * head_dim]"""
    spec, batch, compression = inputs.spec, inputs.batch, inputs.spec.compression
    ones = torch.ones(spec.head_dim, device=inputs.queries.device)
    heads = rms_norm(inputs.queries.view(len(inputs.queries), -1, spec.head_dim), ones, spec.norm_eps)
    queries = _rotated(heads, inputs.cos_sin[:, batch.positions])
    keys = rms_norm(inputs.keys, inputs.weights.kv_norm, spec.norm_eps)
    _write(inputs.window, _rotated(keys.unsqueeze(1), inputs.cos_sin[:, batch.positions])[:, 0])
    if compression is not None:
        assert inputs.entry_inputs is not None and inputs.entry_fields is not None
        _write(inputs.entry_fields[0], inputs.entry_inputs)
        if inputs.index_fields is not None and inputs.index_inputs is not None:
            _write(inputs.index_fields[0], inputs.index_inputs)
    out = torch.empty_like(queries)
    starts: list[int] = batch.query_starts.tolist()
    for row, context in enumerate(batch.context_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        if compression is not None:
            _make_entries(inputs, compression, row, context - (tokens.stop - tokens.start), context)
        out[tokens] = _attend(inputs, queries[tokens].float(), tokens, row, context).to(out.dtype)
    cos, sin = inputs.cos_sin[:, batch.positions]
    return _rotated(out, torch.stack((cos, -sin))).flatten(1)


def _attend(inputs: WindowedInputs, queries: torch.Tensor, tokens: slice, row: int, context: int) -> torch.Tensor:
    """Attend with the queries of one row, [Q, heads, D] → [Q, heads, D]."""
    spec, compression = inputs.spec, inputs.spec.compression
    positions = inputs.batch.positions[tokens]
    first = max(0, int(positions[0]) - spec.window + 1)
    key_positions = torch.arange(first, context, device=queries.device)
    keys = [_read(inputs.window, row, first, context).float()]
    visible = [(key_positions <= positions.unsqueeze(1)) & (key_positions > positions.unsqueeze(1) - spec.window)]
    if compression is not None and inputs.entry_fields is not None and context >= compression.rate:
        keys.append(_entries(inputs.entry_fields[1], row, context, compression).float())
        visible.append(_visible_entries(inputs, compression, tokens, row, context))
    all_keys, mask = torch.cat(keys), torch.cat(visible, dim=1)
    scores = torch.einsum("qhd,kd->qhk", queries, all_keys) * spec.scale
    scores = scores.masked_fill(~mask.unsqueeze(1), float("-inf"))
    sinks = inputs.weights.sinks.view(1, -1, 1).expand(len(queries), -1, 1)
    weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    return torch.einsum("qhk,kd->qhd", weights, all_keys)


# ── entries ────────────────────────────────────────────────────────────────────────────────────────────


def _make_entries(inputs: WindowedInputs, compression: Compression, row: int, start: int, end: int) -> None:
    """Write the entries that tokens [start, end) of a row complete."""
    made = range(start // compression.rate, end // compression.rate)
    for fields, weights in (
        (inputs.entry_fields, inputs.weights.entries),
        (inputs.index_fields, inputs.weights.index_entries),
    ):
        if fields is None or weights is None:
            continue
        for number in made:
            entry = _entry(fields[0], weights, compression, row, number, inputs)
            first = number * compression.rate
            slots = _slots(fields[1], row, first, first + compression.rate)
            kept = fields[1].values
            kept.view(-1, kept.shape[-1])[slots] = entry.view(compression.rate, -1).to(kept.dtype)


def _entry(
    source: CachedField, weights: EntryWeights, compression: Compression, row: int, number: int, inputs: WindowedInputs
) -> torch.Tensor:
    """Return one entry [dim]: the gated mean of its tokens' values, normed, and rotated by its first token's angle."""
    first, dim = number * compression.rate, len(weights.norm)
    values, gates = _read(source, row, first, first + compression.rate).float().chunk(2, dim=1)
    gates = gates + weights.bias
    if compression.overlaps:  # a token's values are [those for the next entry | those for its own entry]
        values, gates = values[:, dim:], gates[:, dim:]
        if number:
            earlier, their_gates = _read(source, row, first - compression.rate, first).float().chunk(2, dim=1)
            values = torch.cat((earlier[:, :dim], values))
            gates = torch.cat(((their_gates + weights.bias)[:, :dim], gates))
    mean = (values * torch.softmax(gates, dim=0)).sum(0, keepdim=True)
    normed = rms_norm(mean, weights.norm, inputs.spec.norm_eps)
    return _rotated(normed.unsqueeze(1), inputs.cos_sin[:, first : first + 1])[0, 0]


def _entries(field: CachedField, row: int, context: int, compression: Compression) -> torch.Tensor:
    """Read all complete entries of a row, [entries, dim]."""
    count = context // compression.rate
    return _read(field, row, 0, count * compression.rate).reshape(count, -1)


def _visible_entries(
    inputs: WindowedInputs, compression: Compression, tokens: slice, row: int, context: int
) -> torch.Tensor:
    """Return the entries that each query sees, bool [Q, entries]: those complete at its position, of which an indexer
    takes the top k."""
    complete = (inputs.batch.positions[tokens] + 1) // compression.rate
    count = context // compression.rate
    visible = torch.arange(count, device=complete.device) < complete.unsqueeze(1)
    indexer = compression.indexer
    if indexer is None or count <= indexer.top_k:
        return visible
    scores = _index_scores(inputs, compression, indexer, tokens, row, context)
    best = scores.masked_fill(~visible, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(visible).scatter_(-1, best[:, : indexer.top_k], True) & visible


def _index_scores(
    inputs: WindowedInputs, compression: Compression, indexer: Indexer, tokens: slice, row: int, context: int
) -> torch.Tensor:
    """[Q, entries]"""
    assert inputs.index_fields is not None and inputs.index_queries is not None and inputs.index_weights is not None
    heads = inputs.index_queries[tokens].view(-1, indexer.num_heads, indexer.head_dim)
    queries = _rotated(heads, inputs.cos_sin[:, inputs.batch.positions[tokens]]).float()
    keys = _entries(inputs.index_fields[1], row, context, compression).float()
    products = torch.einsum("qhd,kd->qhk", queries, keys).relu()
    weights = inputs.index_weights[tokens].float() * indexer.scale
    return torch.einsum("qh,qhk->qk", weights, products)


# ── the cache, and rotation ────────────────────────────────────────────────────────────────────────────


def _write(field: CachedField, values: torch.Tensor) -> None:
    """Write values [T, …] to the tokens' slots."""
    kept = field.values
    kept.view(-1, kept.shape[-1])[field.tables.slots] = values.to(kept.dtype)


def _slots(field: CachedField, row: int, start: int, end: int) -> torch.Tensor:
    """Return the slots of tokens [start, end) of a row."""
    size = field.values.shape[1]
    positions = torch.arange(start, end, device=field.values.device)
    return field.tables.block_tables[row].long()[positions // size] * size + positions % size


def _read(field: CachedField, row: int, start: int, end: int) -> torch.Tensor:
    """Read the values of tokens [start, end) of a row, [end - start, …]."""
    return field.values.view(-1, field.values.shape[-1])[_slots(field, row, start, end)]


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the last 2 * half dimensions of x [T, heads, D] in neighbouring pairs; cos_sin [2, T, half]."""
    cos, sin = cos_sin.unsqueeze(2)
    rest, rotary = x[..., : -2 * cos.shape[-1]], x[..., -2 * cos.shape[-1] :].float()
    first, second = rotary[..., 0::2], rotary[..., 1::2]
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rest, pairs.flatten(-2).to(x.dtype)), dim=-1)
