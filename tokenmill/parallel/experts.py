"""Expert parallelism: the placement of experts on ranks, as data. No torch.

A rank has whole experts instead of some rows of each. All ranks run the router, so they know without communication
which rank computes which token. The experts' outputs are gathered and added in the order of the token's top-k, as on
one rank, so the result has the same bits. An expert may have copies on several ranks, which alternate between its
tokens:

    tokens per expert               8 1 1 1 1 1 1 2
    in order, on two ranks          0 1 2 3 │ 4 5 6 7        11 : 5 tokens
    by load, with a copy of 0       0 7 1 3 5 │ 0 2 4 6       9 : 7 tokens
"""

from __future__ import annotations

from collections.abc import Sequence

Owners = tuple[tuple[int, ...], ...]
"""The ranks that have each expert."""


def place_experts(num_experts: int, size: int, loads: Sequence[float] | None = None, copies: int = 0) -> Owners:
    """Assign the experts of a layer to ranks.

    Without `loads`, in order and evenly. With `loads`, the measured tokens per expert, so that all ranks get about as
    many tokens. `copies`: the number of additional copies, made of the experts with the most tokens.
    """
    if loads is None:
        return tuple((expert * size // num_experts,) for expert in range(num_experts))
    counts = [1] * num_experts
    for _ in range(copies):
        candidates = [expert for expert in range(num_experts) if counts[expert] < size]
        if not candidates:
            break
        counts[max(candidates, key=lambda expert: (loads[expert] / counts[expert], -expert))] += 1
    owners: list[list[int]] = [[] for _ in range(num_experts)]
    tokens, num_experts_of = [0.0] * size, [0] * size
    max_experts = -(-sum(counts) // size)  # so that all ranks need about the same memory
    for expert in sorted(range(num_experts), key=lambda one: (-loads[one] / counts[one], one)):
        for _ in range(counts[expert]):
            others = [rank for rank in range(size) if rank not in owners[expert]]
            candidates = [rank for rank in others if num_experts_of[rank] < max_experts] or others
            rank = min(candidates, key=lambda one: (tokens[one], one))
            owners[expert].append(rank)
            tokens[rank] += loads[expert] / counts[expert]
            num_experts_of[rank] += 1
    return tuple(tuple(sorted(ranks)) for ranks in owners)


def rank_loads(owners: Owners, loads: Sequence[float], size: int) -> list[float]:
    """Return the number of tokens that each rank computes."""
    found = [0.0] * size
    for ranks, load in zip(owners, loads, strict=True):
        for rank in ranks:
            found[rank] += load / len(ranks)
    return found
