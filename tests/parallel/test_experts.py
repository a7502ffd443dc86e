"""Whole experts on ranks: placed evenly, copied where they get most tokens, and the same bits as on one rank."""

from __future__ import annotations

import pytest
import torch

from tests.support.native_models import VARIANTS, all_logits, native_model, random_weights, tokens_for
from tests.support.rank_threads import HeldWeights, on_ranks
from tokenmill.arch.spec import ModelSpec, MoeSpec
from tokenmill.ops.cpu import is_available
from tokenmill.ops.raw import RawTensor
from tokenmill.parallel.cuts import cut_spec, shard_model
from tokenmill.parallel.experts import place_experts, rank_loads
from tokenmill.parallel.group import Shard
from tokenmill.parallel.shared import SharedGroup
from tokenmill.weights.rank_weights import RankWeights

CHUNKS = [40, 1, 19]
WITH_EXPERTS = [name for name, spec in VARIANTS.items() if spec.experts]
needs_native = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])


def test_experts_are_placed_in_order_where_nothing_is_known_of_them() -> None:
    assert place_experts(5, 2) == ((0,), (0,), (0,), (1,), (1,))


@pytest.mark.parametrize(("experts", "size"), [(8, 2), (16, 4), (64, 8), (7, 3)])
def test_copies_even_out_a_skewed_load(experts: int, size: int) -> None:
    """From three times the mean on one rank to less than 1.3 times."""
    loads = [1.0] * experts
    share = experts // size or 1
    heavy = (3 / size) / (1 - 3 / size) if size > 3 else 4.0
    loads[0] = heavy * experts
    before = rank_loads(place_experts(experts, size), loads, size)
    owners = place_experts(experts, size, loads, copies=size - 1)
    after = rank_loads(owners, loads, size)
    assert max(before) * size / sum(before) >= min(3.0, 0.8 * size)
    assert max(after) * size / sum(after) <= 1.3
    assert all(len(set(ranks)) == len(ranks) >= 1 for ranks in owners)
    held = [sum(rank in ranks for ranks in owners) for rank in range(size)]
    assert max(held) - min(held) <= 1 + share, "memory stays even too"


def spread(
    spec: ModelSpec, weights: object, size: int, tokens: list[int], loads: dict[str, list[float]], copies: int
) -> list[tuple[torch.Tensor, tuple[int, int]]]:
    """Logits, and rows of experts computed and received, of each rank."""

    def work(group: SharedGroup) -> tuple[torch.Tensor, tuple[int, int]]:
        cuts, layers = shard_model(spec, size, group.rank, ep=True, loads=loads, copies=copies), range(spec.num_layers)
        source = RankWeights(HeldWeights(weights), cuts, layers)  # type: ignore[arg-type]
        own, shard = cut_spec(spec, size, group.rank), Shard(group, cuts, layers)
        model = native_model(own, source, "", 1, shard=shard, window=group.window)
        return all_logits(model, own, tokens, CHUNKS), model.expert_rows

    return on_ranks(SharedGroup.in_threads(size), work)


@needs_native
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_ranks_with_whole_experts_give_the_bits_of_one(name: str, size: int) -> None:
    """Rows that a rank is sent are exactly those of tokens whose experts are on others."""
    spec = VARIANTS[name]
    weights, tokens = random_weights(spec), tokens_for(spec, sum(CHUNKS))
    alone = native_model(spec, weights, "", 2)
    expected = all_logits(alone, spec, tokens, CHUNKS)
    counts = alone.expert_counts()
    assert sum(map(sum, counts.values())) == sum(
        feed.num_active * sum(CHUNKS)
        for layer in spec.layers
        for feed in (layer.mlp, layer.side_experts)
        if isinstance(feed, MoeSpec)
    )
    found = spread(spec, weights, size, tokens, {}, 0)
    for rank, (logits, (computed, received)) in enumerate(found):
        assert torch.equal(logits, expected)
        owners = {router: place_experts(len(each), size) for router, each in counts.items()}
        pairs = [pair for router, each in counts.items() for pair in zip(each, owners[router], strict=True)]
        here = sum(number for number, ranks in pairs if rank in ranks)
        assert (computed, received) == (here, sum(map(sum, counts.values())) - here)


@needs_native
def test_copies_of_experts_change_loads_and_no_bit() -> None:
    """A router that sends nearly all tokens to one expert."""
    spec = VARIANTS[WITH_EXPERTS[0]]
    weights, tokens = random_weights(spec), tokens_for(spec, sum(CHUNKS))
    for name, raw in weights.tensors.items():
        if name.endswith("router.weight"):
            data = raw.data.clone()
            data[1:] *= 0.05
            weights.tensors[name] = RawTensor(raw.name, raw.shape, data)
    alone = native_model(spec, weights, "", 2)
    expected = all_logits(alone, spec, tokens, CHUNKS)
    loads = {router: [float(n) for n in each] for router, each in alone.expert_counts().items()}
    plain, copied = (spread(spec, weights, 4, tokens, loads if copies else {}, copies) for copies in (0, 6))
    for logits, _ in (*plain, *copied):
        assert torch.equal(logits, expected)

    def fullest(found: list[tuple[torch.Tensor, tuple[int, int]]]) -> float:
        rows = [computed for _, (computed, _) in found]
        return max(rows) * len(rows) / sum(rows)

    assert fullest(copied) <= 1.3 < fullest(plain)
