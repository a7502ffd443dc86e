"""Several ranks of one model, as threads that compute with torch, against one rank."""

from __future__ import annotations

import pytest
import torch

from tests.support.native_models import VARIANTS, all_logits, random_weights, tokens_for, torch_model
from tests.support.rank_threads import on_ranks, torch_logits
from tokenmill.errors import PeerDied
from tokenmill.parallel.threads import ThreadGroup

CHUNKS = [14, 1, 5]
USUAL = ("llama", "sinks", "gate", "shared_keys", "norm_of_all_heads", "layer_inputs", "side_by_side", "conv")


def check(name: str, size: int, *, sums: bool = False) -> None:
    spec = VARIANTS[name]
    weights, tokens = random_weights(spec), tokens_for(spec, sum(CHUNKS))
    found = torch_logits(spec, weights, size, tokens, CHUNKS, sums=sums)
    assert all(torch.equal(found[0], other) for other in found[1:]), "all ranks go on with the same bits"
    # Libraries may add in another order where a product has fewer columns.
    torch.testing.assert_close(
        found[0], all_logits(torch_model(spec, weights), spec, tokens, CHUNKS), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("name", USUAL)
def test_three_ranks_compute_what_one_does(name: str) -> None:
    check(name, 3)


@pytest.mark.slow
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_any_number_of_ranks_computes_what_one_does(name: str, size: int, sums: bool) -> None:
    check(name, size, sums=sums)


@pytest.mark.parametrize("name", USUAL)
def test_sums_over_three_ranks_are_what_one_computes(name: str) -> None:
    check(name, 3, sums=True)


def test_a_rank_that_fails_ends_the_waits_of_the_others() -> None:
    def work(group: ThreadGroup) -> str:
        if group.rank == 1:
            group.abort()
            return "failed"
        with pytest.raises(PeerDied):
            group.all_gather(torch.zeros(1, 2), [2, 2])
        return "noticed"

    assert on_ranks(ThreadGroup.make(2), work) == ["noticed", "failed"]
