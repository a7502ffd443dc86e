"""Cuts on mass: the distribution in whole numbers of 2**-50 (see `fixed_point`), once temperature has shaped it.

Each is a pure function (mass int64 [U, V], rows) -> mass; a cut token's mass becomes 0, and the next cut sees what is
left as the whole. At least one token always survives. Tokens of exactly equal probability stay or go together, so a
cut never depends on the order in which a sort leaves equals.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenmill.sampling.fixed_point import exact_sum
from tokenmill.sampling.rng import XTC
from tokenmill.sampling.rows import RowsInUse
from tokenmill.sampling.topk import best

_FIRST_LOOK = 64  # how many of the best tokens are looked at before the search widens
_WIDEN = 16
_MORE_THAN_ALL = 2**62


def keep_top_p(mass: Tensor, rows: RowsInUse) -> Tensor:
    """The fewest most likely tokens whose probabilities reach top_p (the one that crosses it included)."""
    needed = share_of(mass, rows.param64("top_p"))
    return mass.masked_fill(mass < last_kept(mass, mass, needed), 0)


def keep_min_p(mass: Tensor, rows: RowsInUse) -> Tensor:
    """Tokens at least min_p times as likely as the most likely one."""
    least = rows.param64("min_p") * mass.amax(dim=-1, keepdim=True).double()
    return mass.masked_fill(mass < least.long(), 0)


def keep_top_a(mass: Tensor, rows: RowsInUse) -> Tensor:
    """Tokens with probability of at least top_a times the square of the highest one."""
    highest = mass.amax(dim=-1, keepdim=True).double()
    least = rows.param64("top_a") * highest * (highest / mass.sum(dim=-1, keepdim=True).double())
    return mass.masked_fill(mass < least.long(), 0)


def keep_epsilon(mass: Tensor, rows: RowsInUse) -> Tensor:
    """Tokens with probability of at least epsilon, and always the most likely (Hewitt et al. 2022)."""
    least = (rows.param64("epsilon_cutoff") * mass.sum(dim=-1, keepdim=True).double()).long()
    return mass.masked_fill(mass < least.minimum(mass.amax(dim=-1, keepdim=True)), 0)


def keep_eta(mass: Tensor, rows: RowsInUse) -> Tensor:
    """Tokens with probability of at least min(eta, sqrt(eta) * exp(-entropy)), and always the most likely (Hewitt)."""
    total = mass.sum(dim=-1, keepdim=True).double()
    probs = mass.double() / total
    entropies = exact_sum(-torch.xlogy(probs, probs)).squeeze(1).tolist()
    etas = rows.param64("eta_cutoff").squeeze(1).tolist()
    least = [min(eta, math.sqrt(eta) * math.exp(-entropy)) for eta, entropy in zip(etas, entropies, strict=True)]
    needed = (torch.tensor(least, dtype=torch.float64, device=mass.device).unsqueeze(1) * total).long()
    return mass.masked_fill(mass < needed.minimum(mass.amax(dim=-1, keepdim=True)), 0)


def keep_unsurprising(mass: Tensor, rows: RowsInUse) -> Tensor:
    """Mirostat 2: tokens whose surprise, -log2 of the probability, is at most mu, and always the most likely."""
    least = [2.0 ** -max(-500.0, min(state.mirostat_mu or 0.0, 500.0)) for state in rows.states]
    shares = torch.tensor(least, dtype=torch.float64, device=mass.device).unsqueeze(1)
    needed = (shares * mass.sum(dim=-1, keepdim=True).double()).ceil()
    return mass.masked_fill(mass < needed.minimum(mass.amax(dim=-1, keepdim=True).double()), 0)


def exclude_top_choices(mass: Tensor, rows: RowsInUse) -> Tensor:
    """XTC, as llama.cpp: with a chance, of the tokens that reach the threshold only the least likely one stays."""
    hits = [u < s.params.xtc_probability for u, s in zip(rows.uniforms(XTC), rows.states, strict=True)]
    is_hit = torch.tensor(hits, device=mass.device).unsqueeze(1)
    threshold = (rows.param64("xtc_threshold") * mass.sum(dim=-1, keepdim=True).double()).ceil().long().clamp(min=1)
    reaches = mass >= threshold
    least = mass.masked_fill(~reaches, _MORE_THAN_ALL).amin(dim=-1, keepdim=True)
    return mass.masked_fill(is_hit & (mass > least), 0)


def share_of(mass: Tensor, share: Tensor) -> Tensor:
    """`share` of each row's whole mass, at least one unit so that one token is kept: int64 [U, 1]."""
    total = mass.sum(dim=-1, keepdim=True)
    return (share * total.double()).ceil().long().clamp(min=1).minimum(total)


def last_kept(score: Tensor, mass: Tensor, needed: Tensor, look: int = _FIRST_LOOK) -> Tensor:
    """Score of the last token kept when tokens are taken best score first until `needed` mass is reached: [U, 1].

    Looks at the `look` best only, and widens for the rows where they were not enough. Mass is in whole numbers, so
    the answer does not depend on how far was looked.
    """
    vocab = score.shape[-1]
    top, where = best(score, min(look, vocab))
    taken = mass.gather(1, where).cumsum(dim=-1)
    place = (taken < needed).sum(dim=-1, keepdim=True)
    last = top.gather(1, place.clamp(max=top.shape[1] - 1))
    short = (place.squeeze(1) == top.shape[1]).nonzero().squeeze(1)
    if short.numel() and look < vocab:
        wider = last_kept(score[short], mass[short], needed[short], look * _WIDEN)
        last = last.index_copy(0, short, wider)
    return last
