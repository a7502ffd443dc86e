"""Token sampling on the device: temperature, top-k, top-p, min-p and sampling, one program per row, from logits after
penalties and biases (`penalties.py`).

The same steps in the same order as `sampling/steps.py`: softmax in integers of 2**-50, cuts on these, then the first
token whose cumulative probability passes u * total. Sums of integers do not depend on their order, so a row's token is
the same in any batch; against a CPU only the last bit of exp differs.

Truncation needs the k-th best value, or the value at which the sum of probabilities reaches a share. Distances below
the highest logit are non-negative floats, whose bits sort like the numbers. A pass over the row sums the weights within
each of eight borders, and the next pass divides the interval between the two relevant ones; once it contains few
tokens, they are compacted and searched separately:

    sum within distance    |####|#|.|.|.|.|.|.|      the first of eight borders with enough weight, then eight within
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.launch.kernel import kernel
from tokenmill.ops.triton.sampling.penalties import MIN_P, NUM_PARAMS, TEMPERATURE, TOP_K, TOP_P

NO_NUMBER = tl.constexpr(-1)  # instead of a token: a logit is NaN, or the highest is not finite
NOTHING_LEFT = tl.constexpr(-2)  # instead of a token: every token was excluded
BLOCK = 2048
FEW = 2048  # up to this many tokens are searched in registers


@triton.jit
def _fixed_prob(distance, unit):
    """Return probabilities as integers in units of 2**-50; `distance` below the highest logit, `unit`: the probability
    of a token at distance 0."""
    return (tl.exp(-distance) * unit).to(tl.int64)


@triton.jit
def _distances(row_logits, start, vocab, highest, rate, BLOCK: tl.constexpr):
    """`rate`: one over the temperature"""
    tokens = start + tl.arange(0, BLOCK)
    values = tl.load(row_logits + tokens, mask=tokens < vocab, other=float("-inf"))
    return (highest - values) * rate


@triton.jit
def _bits(distance):
    return distance.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _weights(distance, unit, limit, COUNTS: tl.constexpr):
    """Return the weight of each token: 1 (COUNTS) or its fixed-point probability; 0 beyond `limit`."""
    inside = _bits(distance) <= limit
    if COUNTS:
        return inside.to(tl.int64)
    return tl.where(inside, _fixed_prob(distance, unit), 0)


@triton.jit
def _between(ends, sums, counts, needed, low, before):
    """Return the first border whose weight reaches `needed`, and the one before: (low, high, weight up to low, tokens
    between)."""
    steps = tl.arange(0, 8)
    index = tl.minimum(8 - tl.sum((sums >= needed).to(tl.int32), axis=0), 7)
    high = tl.sum(tl.where(steps == index, ends, 0), axis=0)
    inside = tl.sum(tl.where(steps == index, counts, 0), axis=0)
    if index > 0:
        low = tl.sum(tl.where(steps == index - 1, ends, 0), axis=0) + 1
        before = tl.sum(tl.where(steps == index - 1, sums, 0), axis=0)
        inside -= tl.sum(tl.where(steps == index - 1, counts, 0), axis=0)
    return low, high, before, inside


@triton.jit
def _ends(low, high):
    """Return eight borders that divide [low, high] evenly, the last one at `high` or beyond."""
    return low + (tl.arange(0, 8) + 1).to(tl.int64) * ((high - low) // 8 + 1) - 1


@triton.jit
def _border(
    row_logits, picked, vocab, highest, rate, unit, limit, wanted,
    COUNTS: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the bits of the smallest distance that includes `wanted` tokens (COUNTS), or this much probability."""
    steps = tl.arange(0, 8)
    # Fixed first borders: 0, 0.25, 1, 2, 4, 8, 16 and everything.
    ends = tl.where(steps < 3, 0x3F7FFFFF - (2 - steps) * 0x1000000, 0x3F7FFFFF + (steps - 2) * 0x800000).to(tl.int64)
    ends = tl.where(steps == 0, 0, tl.where(steps == 7, 0x7F7FFFFF, ends))
    low, high = tl.zeros((), tl.int64), tl.full((), 0x7F7FFFFF, tl.int64)
    before, needed = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    inside = tl.full((), 1 << 30, tl.int32)
    while (low < high) & (inside > FEW):
        sums = tl.zeros((BLOCK, 8), tl.int64)
        counts = tl.zeros((BLOCK, 8), tl.int32)
        for start in range(0, vocab, BLOCK):
            distance = _distances(row_logits, start, vocab, highest, rate, BLOCK)
            is_within = _bits(distance).to(tl.int64)[:, None] <= ends[None, :]
            sums += tl.where(is_within, _weights(distance, unit, limit, COUNTS)[:, None], 0)
            counts += is_within.to(tl.int32)
        held = tl.sum(sums, axis=0)
        if needed == 0:
            everything = tl.max(held, axis=0)
            needed = wanted.to(tl.int64) if COUNTS else tl.ceil(wanted * everything.to(tl.float64)).to(tl.int64)
            needed = tl.minimum(tl.maximum(needed, 1), everything)
        low, high, before, inside = _between(ends, held, tl.sum(counts, axis=0), needed, low, before)
        ends = _ends(low, high)
    if low < high:
        few = _picked(row_logits, picked, vocab, highest, rate, low, high, FEW, BLOCK)
        weights = _weights(few.to(tl.float32, bitcast=True), unit, limit, COUNTS)
        while low < high:
            is_within = few.to(tl.int64)[:, None] <= ends[None, :]
            held = before + tl.sum(tl.where(is_within, weights[:, None], 0), axis=0)
            # `before` is the weight below all compacted tokens, so it does not change.
            low, high, _, inside = _between(ends, held, tl.sum(is_within.to(tl.int32), axis=0), needed, low, before)
            ends = _ends(low, high)
    return low.to(tl.int32)


@triton.jit
def _picked(row_logits, picked, vocab, highest, rate, low, high, FEW: tl.constexpr, BLOCK: tl.constexpr):
    """Compact the bits of the distances within [low, high], at most FEW, through memory; the rest is NaN."""
    count = tl.zeros((), tl.int32)
    for start in range(0, vocab, BLOCK):
        bits = _bits(_distances(row_logits, start, vocab, highest, rate, BLOCK))
        chosen = ((bits >= low) & (bits <= high)).to(tl.int32)
        tl.store(picked + count + tl.cumsum(chosen, axis=0) - 1, bits, mask=chosen > 0)
        count += tl.sum(chosen, axis=0)
    tl.debug_barrier()
    indices = tl.arange(0, FEW)
    return tl.load(picked + indices, mask=indices < count, other=0x7FFFFFFF)


@kernel
def _draw(
    logits, rows, uniforms, row_params, drawn, newest, picked, vocab, FEW: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    number = tl.program_id(0)
    row = tl.load(rows + number).to(tl.int64)
    row_logits = logits + number.to(tl.int64) * vocab
    token = tl.full((), NO_NUMBER, tl.int64)
    if row >= 0:
        highest, index, is_broken = _highest(row_logits, vocab, BLOCK)
        temperature = tl.load(row_params + row * NUM_PARAMS + TEMPERATURE).to(tl.float32)
        if is_broken == 0:
            if highest == float("-inf"):
                token = tl.full((), NOTHING_LEFT, tl.int64)
            elif temperature == 0.0:
                token = index
            else:
                token = _drawn(
                    row_logits, picked + number * FEW, vocab, highest, tl.div_rn(1.0, temperature),
                    row_params + row * NUM_PARAMS, tl.load(uniforms + number), FEW, BLOCK,
                )  # fmt: skip
        tl.store(newest + row, token)
    tl.store(drawn + number, token)


@triton.jit
def _highest(row_logits, vocab, BLOCK: tl.constexpr):
    """(highest logit, its first index, whether a logit is not a number)"""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    indices = tl.zeros((BLOCK,), tl.int64)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        values = tl.load(row_logits + tokens, mask=tokens < vocab, other=float("-inf"))
        broken |= ((values != values) | (values == float("inf"))).to(tl.int32)
        indices = tl.where(values > best, tokens.to(tl.int64), indices)
        best = tl.maximum(best, values)
    highest = tl.max(best, axis=0)
    first = tl.min(tl.where(best == highest, indices, 1 << 40), axis=0)
    return highest, first, tl.max(broken, axis=0)


@triton.jit
def _drawn(row_logits, picked, vocab, highest, rate, row_params, uniform, FEW: tl.constexpr, BLOCK: tl.constexpr):
    top_k, top_p = tl.load(row_params + TOP_K), tl.load(row_params + TOP_P)
    limit = tl.full((), 0x7F7FFFFF, tl.int32)
    if top_k > 0:
        limit = _border(row_logits, picked, vocab, highest, rate, 1.0, limit, top_k, True, FEW, BLOCK)
    exps = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        distance = _distances(row_logits, start, vocab, highest, rate, BLOCK)
        exps += tl.where(_bits(distance) <= limit, tl.exp(-distance), 0.0)
    unit = tl.div_rn(1125899906842624.0, tl.sum(exps, axis=0))
    least = tl.full((), 1, tl.int64)
    if top_p < 1.0:
        border = _border(row_logits, picked, vocab, highest, rate, unit, limit, top_p, False, FEW, BLOCK)
        least = tl.maximum(_fixed_prob(border.to(tl.float32, bitcast=True), unit), 1)
    min_p = tl.load(row_params + MIN_P)
    if min_p > 0.0:
        least = tl.maximum(least, (min_p * unit.to(tl.int64).to(tl.float64)).to(tl.int64))
    sums = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab, BLOCK):
        sums += _kept(row_logits, start, vocab, highest, rate, unit, limit, least, BLOCK)
    total = tl.sum(sums, axis=0)
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    before = tl.zeros((), tl.int64)
    token = tl.full((), NO_NUMBER, tl.int64)
    start = 0
    while (start < vocab) & (token < 0):
        kept = _kept(row_logits, start, vocab, highest, rate, unit, limit, least, BLOCK)
        here = tl.sum(kept, axis=0)
        if before + here > target:
            is_past = (before + tl.cumsum(kept, axis=0)) > target
            token = start + (BLOCK - tl.sum(is_past.to(tl.int64), axis=0))
        before += here
        start += BLOCK
    return token


@triton.jit
def _kept(row_logits, start, vocab, highest, rate, unit, limit, least, BLOCK: tl.constexpr):
    distance = _distances(row_logits, start, vocab, highest, rate, BLOCK)
    fixed_probs = _fixed_prob(distance, unit)
    return tl.where((_bits(distance) <= limit) & (fixed_probs >= least), fixed_probs, 0)


def draw_tokens(
    logits: torch.Tensor, rows: torch.Tensor, uniforms: torch.Tensor, row_params: torch.Tensor, newest: torch.Tensor
) -> torch.Tensor:
    """logits float32 [R, vocab], rows int32 [R] (negative: padding), uniforms float64 [R], parameters float64
    [max_rows, 8] → tokens int64 [R], negative if there is none; they become the newest tokens of their rows."""
    num_rows, vocab = logits.shape
    drawn = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    picked = torch.empty(num_rows, FEW, dtype=torch.int32, device=logits.device)
    _draw[(num_rows,)](
        logits, rows, uniforms, row_params, drawn, newest, picked, vocab, FEW, BLOCK,
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return drawn
