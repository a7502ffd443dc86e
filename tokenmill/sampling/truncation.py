"""Logits steps that reshape or cut the distribution: temperatures, top-n-sigma, top-k, typical.

Each is a pure function (logits float32 [U, V], rows) -> logits; a cut token becomes -inf, and the next step sees the
distribution of what is left. At least one token always survives. Tokens of exactly equal probability stay or go
together, so a cut never depends on the order in which a sort leaves equals.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenmill.params import SamplingParams
from tokenmill.sampling.fixed_point import exact_sum, weights
from tokenmill.sampling.rows import RowsInUse
from tokenmill.sampling.topk import best
from tokenmill.sampling.truncation_sorted import last_kept, share_of

_LOWEST = 1000.0  # a logit further below the highest counts as this far: squares of it still add up in whole numbers


def scale_temperature(logits: Tensor, rows: RowsInUse) -> Tensor:
    # relative to the maximum first: a tiny temperature then cannot overflow the best token to inf
    return _divided(logits - logits.amax(dim=-1, keepdim=True), rows.param("temperature"))


def move_temperature(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Dynamic temperature, as llama.cpp: low where one token is sure, high where all are equally likely.

    low, high = temperature -+ range;  low + (high - low) * (entropy / greatest entropy) ** exponent
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    entropies = (-exact_sum(torch.softmax(logits, dim=-1) * logprobs)).squeeze(1).tolist()
    alive = (logits != -torch.inf).sum(dim=-1).tolist()
    moved = [
        _moved_temperature(state.params, entropy, num)
        for state, entropy, num in zip(rows.states, entropies, alive, strict=True)
    ]
    temperature = torch.tensor(moved, dtype=torch.float32, device=rows.device).unsqueeze(1)
    return _divided(logits - logits.amax(dim=-1, keepdim=True), temperature)


def _divided(below: Tensor, temperature: Tensor) -> Tensor:
    """At temperature 0, or one that is 0 as a float32, only the best stay: at 0 below themselves."""
    return torch.where(below == 0.0, below, below / temperature)


def _moved_temperature(params: SamplingParams, entropy: float, num_alive: int) -> float:
    if num_alive <= 1:
        return params.temperature
    low, high = max(0.0, params.temperature - params.dynatemp_range), params.temperature + params.dynatemp_range
    share = min(1.0, max(0.0, entropy / math.log(num_alive)))
    return low + (high - low) * float(share**params.dynatemp_exponent)


def keep_top_n_sigma(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Logits within n standard deviations of the highest (Tang et al. 2024); tokens already cut do not count."""
    below = logits - logits.amax(dim=-1, keepdim=True)
    bounded = below.clamp(min=-_LOWEST).masked_fill(below == -torch.inf, 0.0).double()
    num_alive = (below != -torch.inf).sum(dim=-1, keepdim=True).double()
    mean = exact_sum(bounded, bits=20) / num_alive
    variance = exact_sum(bounded * bounded, bits=20) / num_alive - mean * mean
    return _cut(logits, below < -(rows.param64("top_n_sigma") * variance.clamp(min=0.0).sqrt()).float())


def keep_top_k(logits: Tensor, rows: RowsInUse) -> Tensor:
    """The k most likely tokens (as transformers: ties with the k-th stay)."""
    vocab = logits.shape[-1]
    most = min(max(state.params.top_k for state in rows.states), vocab)
    top, _ = best(logits, most)
    kth = top.gather(1, rows.param64("top_k").long().clamp(max=vocab) - 1)
    return _cut(logits, logits < kth)


def keep_typical(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Tokens whose surprise is nearest to the entropy, until their mass reaches typical_p (Meister et al. 2022)."""
    logprobs = torch.log_softmax(logits, dim=-1)
    entropy = -exact_sum(torch.softmax(logits, dim=-1) * logprobs)
    closeness = -(-logprobs - entropy.float()).abs()
    mass = weights(logits)
    needed = share_of(mass, rows.param64("typical_p"))
    return _cut(logits, closeness < last_kept(closeness, mass, needed))


def _cut(logits: Tensor, where: Tensor) -> Tensor:
    return logits.masked_fill(where, -torch.inf)
