"""Sampler steps that reshape or truncate the distribution: temperatures, top-k, top-p, min-p, typical, XTC and others.

The first group works on logits: (logits float32 [U, V], rows) -> logits, where a removed token becomes -inf. The second
works on fixed-point probabilities after the temperature: (fixed_probs int64 [U, V], rows) -> fixed_probs, where a
removed token becomes 0. Each is a pure function, and the next one sees what is left as the whole distribution. At least
one token always stays. Tokens of exactly equal probability stay or go together, so the result never depends on the
order in which a sort leaves equal values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenmill.params import SamplingParams
from tokenmill.sampling.fixed_point import exact_sum, to_fixed_probs, topk
from tokenmill.sampling.rng import XTC
from tokenmill.sampling.rows import RowsInUse

_MAX_DISTANCE = 1000.0  # distances below the highest logit are clamped to this, so that sums of squares fit in 63 bits
_FIRST_SEARCHED = 64  # number of best tokens searched at first; then _SEARCH_GROWTH times as many
_SEARCH_GROWTH = 16
_ABOVE_ALL = 2**62  # larger than any fixed-point probability


# ── on logits ──────────────────────────────────────────────────────────────────────────────────────────


def scale_temperature(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Divide the logits by the temperature."""
    # relative to the maximum first: so a tiny temperature cannot overflow the highest logit to inf
    return _divided(logits - logits.amax(dim=-1, keepdim=True), rows.param("temperature"))


def move_temperature(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Dynamic temperature, as llama.cpp: low where one token is certain, high where all are equally likely.

    low, high = temperature -+ range;  low + (high - low) * (entropy / greatest entropy) ** exponent
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    entropies = (-exact_sum(torch.softmax(logits, dim=-1) * logprobs)).squeeze(1).tolist()
    alive = (logits != -torch.inf).sum(dim=-1).tolist()
    dynamic = [
        _dynamic_temperature(state.params, entropy, num)
        for state, entropy, num in zip(rows.states, entropies, alive, strict=True)
    ]
    temperature = torch.tensor(dynamic, dtype=torch.float32, device=rows.device).unsqueeze(1)
    return _divided(logits - logits.amax(dim=-1, keepdim=True), temperature)


def _divided(below: Tensor, temperature: Tensor) -> Tensor:
    """Divide by the temperature; where that is 0 as a float32, only the highest logits (0 here) stay finite."""
    return torch.where(below == 0.0, below, below / temperature)


def _dynamic_temperature(params: SamplingParams, entropy: float, num_alive: int) -> float:
    if num_alive <= 1:
        return params.temperature
    low, high = max(0.0, params.temperature - params.dynatemp_range), params.temperature + params.dynatemp_range
    share = min(1.0, max(0.0, entropy / math.log(num_alive)))
    return low + (high - low) * float(share**params.dynatemp_exponent)


def keep_top_n_sigma(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Keep the logits within n standard deviations of the highest (Tang et al. 2024); removed tokens do not count."""
    below = logits - logits.amax(dim=-1, keepdim=True)
    bounded = below.clamp(min=-_MAX_DISTANCE).masked_fill(below == -torch.inf, 0.0).double()
    num_alive = (below != -torch.inf).sum(dim=-1, keepdim=True).double()
    mean = exact_sum(bounded, bits=20) / num_alive
    variance = exact_sum(bounded * bounded, bits=20) / num_alive - mean * mean
    return _remove(logits, below < -(rows.param64("top_n_sigma") * variance.clamp(min=0.0).sqrt()).float())


def keep_top_k(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Keep the k most likely tokens, and those equal to the k-th (as transformers)."""
    vocab = logits.shape[-1]
    max_k = min(max(state.params.top_k for state in rows.states), vocab)
    top, _ = topk(logits, max_k)
    kth = top.gather(1, rows.param64("top_k").long().clamp(max=vocab) - 1)
    return _remove(logits, logits < kth)


def keep_typical(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Keep the tokens with a surprise nearest to the entropy that together reach typical_p (Meister et al. 2022)."""
    logprobs = torch.log_softmax(logits, dim=-1)
    entropy = -exact_sum(torch.softmax(logits, dim=-1) * logprobs)
    closeness = -(-logprobs - entropy.float()).abs()
    fixed_probs = to_fixed_probs(logits)
    needed = share_of(fixed_probs, rows.param64("typical_p"))
    return _remove(logits, closeness < last_kept(closeness, fixed_probs, needed))


def _remove(logits: Tensor, where: Tensor) -> Tensor:
    return logits.masked_fill(where, -torch.inf)


# ── on fixed-point probabilities ───────────────────────────────────────────────────────────────────────


def keep_top_p(fixed_probs: Tensor, rows: RowsInUse) -> Tensor:
    """Keep the fewest most likely tokens whose probabilities reach top_p (the one that crosses it included)."""
    needed = share_of(fixed_probs, rows.param64("top_p"))
    return fixed_probs.masked_fill(fixed_probs < last_kept(fixed_probs, fixed_probs, needed), 0)


def keep_min_p(fixed_probs: Tensor, rows: RowsInUse) -> Tensor:
    """Keep the tokens at least min_p times as likely as the most likely one."""
    least = rows.param64("min_p") * fixed_probs.amax(dim=-1, keepdim=True).double()
    return fixed_probs.masked_fill(fixed_probs < least.long(), 0)


def keep_top_a(fixed_probs: Tensor, rows: RowsInUse) -> Tensor:
    """Keep the tokens with probability of at least top_a times the square of the highest one."""
    highest = fixed_probs.amax(dim=-1, keepdim=True).double()
    least = rows.param64("top_a") * highest * (highest / fixed_probs.sum(dim=-1, keepdim=True).double())
    return fixed_probs.masked_fill(fixed_probs < least.long(), 0)


def keep_epsilon(fixed_probs: Tensor, rows: RowsInUse) -> Tensor:
    """Keep the tokens with probability of at least epsilon, and always the most likely (Hewitt et al. 2022)."""
    least = (rows.param64("epsilon_cutoff") * fixed_probs.sum(dim=-1, keepdim=True).double()).long()
    return fixed_probs.masked_fill(fixed_probs < least.minimum(fixed_probs.amax(dim=-1, keepdim=True)), 0)


def keep_eta(fixed_probs: Tensor, rows: RowsInUse) -> Tensor:
    """Keep tokens with probability of at least min(eta, sqrt(eta) * exp(-entropy)), and the most likely (Hewitt)."""
    total = fixed_probs.sum(dim=-1, keepdim=True).double()
    probs = fixed_probs.double() / total
    entropies = exact_sum(-torch.xlogy(probs, probs)).squeeze(1).tolist()
    etas = rows.param64("eta_cutoff").squeeze(1).tolist()
    least = [min(eta, math.sqrt(eta) * math.exp(-entropy)) for eta, entropy in zip(etas, entropies, strict=True)]
    needed = (torch.tensor(least, dtype=torch.float64, device=fixed_probs.device).unsqueeze(1) * total).long()
    return fixed_probs.masked_fill(fixed_probs < needed.minimum(fixed_probs.amax(dim=-1, keepdim=True)), 0)


def keep_unsurprising(fixed_probs: Tensor, rows: RowsInUse) -> Tensor:
    """Mirostat 2: keep the tokens with a surprise, -log2 of the probability, of at most mu, and the most likely one."""
    least = [2.0 ** -max(-500.0, min(state.mirostat_mu or 0.0, 500.0)) for state in rows.states]
    shares = torch.tensor(least, dtype=torch.float64, device=fixed_probs.device).unsqueeze(1)
    needed = (shares * fixed_probs.sum(dim=-1, keepdim=True).double()).ceil()
    return fixed_probs.masked_fill(fixed_probs < needed.minimum(fixed_probs.amax(dim=-1, keepdim=True).double()), 0)


def exclude_top_choices(fixed_probs: Tensor, rows: RowsInUse) -> Tensor:
    """XTC, as llama.cpp: with some probability, keep only the least likely of the tokens above the threshold."""
    hits = [u < s.params.xtc_probability for u, s in zip(rows.uniforms(XTC), rows.states, strict=True)]
    is_hit = torch.tensor(hits, device=fixed_probs.device).unsqueeze(1)
    threshold = (
        (rows.param64("xtc_threshold") * fixed_probs.sum(dim=-1, keepdim=True).double()).ceil().long().clamp(min=1)
    )
    reaches = fixed_probs >= threshold
    least = fixed_probs.masked_fill(~reaches, _ABOVE_ALL).amin(dim=-1, keepdim=True)
    return fixed_probs.masked_fill(is_hit & (fixed_probs > least), 0)


def share_of(fixed_probs: Tensor, share: Tensor) -> Tensor:
    """Return `share` of each row's total probability, at least one unit so that one token is kept: int64 [U, 1]."""
    total = fixed_probs.sum(dim=-1, keepdim=True)
    return (share * total.double()).ceil().long().clamp(min=1).minimum(total)


def last_kept(score: Tensor, fixed_probs: Tensor, needed: Tensor, num_searched: int = _FIRST_SEARCHED) -> Tensor:
    """Return the score of the last token kept when tokens are kept best score first until `needed` is reached: [U, 1].

    Only the `num_searched` best tokens are searched, and more for the rows that need them. Fixed-point sums are exact,
    so the result does not depend on that number.
    """
    vocab = score.shape[-1]
    top, where = topk(score, min(num_searched, vocab))
    taken = fixed_probs.gather(1, where).cumsum(dim=-1)
    position = (taken < needed).sum(dim=-1, keepdim=True)
    last = top.gather(1, position.clamp(max=top.shape[1] - 1))
    short = (position.squeeze(1) == top.shape[1]).nonzero().squeeze(1)
    if short.numel() and num_searched < vocab:
        wider = last_kept(score[short], fixed_probs[short], needed[short], num_searched * _SEARCH_GROWTH)
        last = last.index_copy(0, short, wider)
    return last
