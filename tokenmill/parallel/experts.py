"""The placement of experts on ranks, as data. No torch.

With expert parallel a rank has whole experts instead of some rows of each. Every rank knows which experts each token
has chosen, so they agree on who computes what without a word; an expert's results come back as they are and are added
in the order of the token's choice, as on one rank: no bit changes. An expert may be on several ranks, which then take
turns with its tokens:

    tokens of each expert      8 1 1 1 1 1 1 2
    in order, on two ranks     0 1 2 3 │ 4 5 6 7        11 : 5
    by loads, a copy of 0      0 7 1 3 5 │ 0 2 4 6       9 : 7
"""

from __future__ import annotations

from collections.abc import Sequence

Owners = tuple[tuple[int, ...], ...]
"""The ranks that have each expert."""


def place_experts(num_experts: int, size: int, loads: Sequence[float] | None = None, copies: int = 0) -> Owners:
    """Place the experts of a layer on ranks: in order and evenly; with `loads`, tokens that each has been seen to get,
    so that ranks get about as many. `copies`: so many more than one of each, of those with most tokens."""
    if loads is None:
        return tuple((expert * size // num_experts,) for expert in range(num_experts))
    counts = [1] * num_experts
    for _ in range(copies):
        able = [expert for expert in range(num_experts) if counts[expert] < size]
        if not able:
            break
        counts[max(able, key=lambda expert: (loads[expert] / counts[expert], -expert))] += 1
    owners: list[list[int]] = [[] for _ in range(num_experts)]
    filled, held = [0.0] * size, [0] * size
    most = -(-sum(counts) // size)  # ranks have as many weights
    for expert in sorted(range(num_experts), key=lambda one: (-loads[one] / counts[one], one)):
        for _ in range(counts[expert]):
            able = [rank for rank in range(size) if held[rank] < most and rank not in owners[expert]]
            able = able or [rank for rank in range(size) if rank not in owners[expert]]
            rank = min(able, key=lambda one: (filled[one], one))
            owners[expert].append(rank)
            filled[rank] += loads[expert] / counts[expert]
            held[rank] += 1
    return tuple(tuple(sorted(ranks)) for ranks in owners)


def rank_loads(owners: Owners, loads: Sequence[float], size: int) -> list[float]:
    """Tokens that each rank gets."""
    found = [0.0] * size
    for ranks, load in zip(owners, loads, strict=True):
        for rank in ranks:
            found[rank] += load / len(ranks)
    return found
