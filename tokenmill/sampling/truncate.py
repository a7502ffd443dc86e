"""Logits steps that reshape or cut the distribution: temperature, top-k, typical, top-p, min-p.

Each is a pure function (logits float32 [U, V], rows) -> logits; a cut token becomes -inf, and the next step sees the
distribution of what is left. At least one token always survives. Tokens of exactly equal probability stay or go
together, so a cut never depends on the order in which a sort leaves equals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.sampling.fixed_point import exact_sum, weights
from tokenmill.sampling.rows import RowsInUse

_FIRST_LOOK = 128  # how many of the best tokens are looked at before the search widens
_WIDEN = 8


def scale_temperature(logits: Tensor, rows: RowsInUse) -> Tensor:
    # relative to the maximum first: a tiny temperature then cannot overflow the best token to inf
    return (logits - logits.amax(dim=-1, keepdim=True)) / rows.knob("temperature")


def keep_top_k(logits: Tensor, rows: RowsInUse) -> Tensor:
    """The k most likely tokens (as transformers: ties with the k-th stay)."""
    vocab = logits.shape[-1]
    most = min(max(state.params.top_k for state in rows.states), vocab)
    best = logits.topk(most, dim=-1).values
    kth = best.gather(1, rows.knob64("top_k").long().clamp(max=vocab) - 1)
    return _cut(logits, logits < kth)


def keep_top_p(logits: Tensor, rows: RowsInUse) -> Tensor:
    """The fewest most likely tokens whose probabilities reach top_p (the one that crosses it included)."""
    mass = weights(logits)
    needed = _share(mass, rows.knob64("top_p"))
    return _cut(logits, mass < _last_kept(mass, mass, needed))


def keep_typical(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Tokens whose surprise is nearest to the entropy, until their mass reaches typical_p (Meister et al. 2022)."""
    logprobs = torch.log_softmax(logits, dim=-1)
    entropy = -exact_sum(torch.softmax(logits, dim=-1) * logprobs)
    closeness = -(-logprobs - entropy.float()).abs()
    mass = weights(logits)
    needed = _share(mass, rows.knob64("typical_p"))
    return _cut(logits, closeness < _last_kept(closeness, mass, needed))


def keep_min_p(logits: Tensor, rows: RowsInUse) -> Tensor:
    """Tokens at least min_p times as likely as the most likely one."""
    return _cut(logits, logits < logits.amax(dim=-1, keepdim=True) + rows.knob("log_min_p"))


def _cut(logits: Tensor, where: Tensor) -> Tensor:
    return logits.masked_fill(where, -torch.inf)


def _share(mass: Tensor, share: Tensor) -> Tensor:
    """`share` of each row's whole mass, at least one unit so that one token is kept: int64 [U, 1]."""
    total = mass.sum(dim=-1, keepdim=True)
    return (share * total.double()).ceil().long().clamp(min=1).minimum(total)


def _last_kept(score: Tensor, mass: Tensor, needed: Tensor, look: int = _FIRST_LOOK) -> Tensor:
    """Score of the last token kept when tokens are taken best score first until `needed` mass is reached: [U, 1].

    Looks at the `look` best only, and widens for the rows where they were not enough. Mass is in whole numbers, so
    the answer does not depend on how far was looked.
    """
    vocab = score.shape[-1]
    best, where = score.topk(min(look, vocab), dim=-1)
    taken = mass.gather(1, where).cumsum(dim=-1)
    place = (taken < needed).sum(dim=-1, keepdim=True)
    last = best.gather(1, place.clamp(max=best.shape[1] - 1))
    short = (place.squeeze(1) == best.shape[1]).nonzero().squeeze(1)
    if short.numel() and look < vocab:
        wider = _last_kept(score[short], mass[short], needed[short], look * _WIDEN)
        last = last.index_copy(0, short, wider)
    return last
