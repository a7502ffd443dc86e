"""Several ranks of one model with native kernels: the same bits as one rank, for every model they compute."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.support.native_models import SETS, VARIANTS, all_logits, native_model, random_weights, tokens_for
from tests.support.rank_threads import native_logits, on_ranks
from tokenmill.errors import PeerDied
from tokenmill.ops.cpu import is_available
from tokenmill.ops.cpu.availability import native
from tokenmill.parallel.shared import SharedGroup

pytestmark = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
CHUNKS = [40, 1, 19]


def check(name: str, size: int, isa: str, *, quantised: bool, bits: str = "8") -> None:
    spec = VARIANTS[name]
    weights, tokens = random_weights(spec, quantised), tokens_for(spec, sum(CHUNKS))
    expected = all_logits(native_model(spec, weights, isa, 2, bits), spec, tokens, CHUNKS)
    for found in native_logits(spec, weights, size, tokens, CHUNKS, isa, bits):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_three_ranks_give_the_bits_of_one(name: str, quantised: bool) -> None:
    check(name, 3, "", quantised=quantised, bits="mixed")


@pytest.mark.slow
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("name", VARIANTS)
def test_any_number_of_ranks_gives_the_bits_of_one(name: str, size: int, isa: str) -> None:
    check(name, size, isa, quantised=False)
    for bits in ("8", "mixed", "16"):
        check(name, size, isa, quantised=True, bits=bits)


def test_what_does_not_fit_the_window_goes_in_several_exchanges() -> None:
    """A room holds 16 numbers: parts of rows, rows that are looked up and the best logits all need several."""
    windows = native().thread_windows(3, 64)
    parts = [np.arange(size, dtype=np.uint8) + size for size in (200, 0, 65)]

    def gather(group: SharedGroup) -> list[int]:
        out = np.zeros(265, np.uint8)
        group.window.all_gather(parts[group.rank], out, [200, 0, 65])
        return out.tolist()

    expected = np.concatenate(parts).tolist()
    assert on_ranks([SharedGroup(window) for window in windows], gather) == [expected] * 3


def test_ranks_in_threads_gather_tensors() -> None:
    def gather(group: SharedGroup) -> list[torch.Tensor]:
        return group.all_gather(torch.full((2, group.rank + 1), float(group.rank)), [1, 2, 3])

    for found in on_ranks(SharedGroup.in_threads(3), gather):
        assert [part.tolist() for part in found] == [[[float(r)] * (r + 1)] * 2 for r in range(3)]


def test_a_wait_ends_when_the_group_is_given_up() -> None:
    first, second = SharedGroup.in_threads(2)
    ender = threading.Timer(0.05, second.abort)
    ender.start()
    with pytest.raises(PeerDied, match="another rank has ended"):
        first.all_gather(torch.zeros(1, 2), [2, 2])
    ender.join()
    assert first.is_aborted and second.is_aborted
    with pytest.raises(PeerDied):
        second.all_gather(torch.zeros(1, 2), [2, 2])


def test_a_wait_for_a_rank_that_never_comes_has_an_end() -> None:
    first, _ = SharedGroup.in_threads(2)
    first.window.set_limit_s(0.05)
    with pytest.raises(PeerDied, match="does not come"):
        first.all_gather(torch.zeros(1, 2), [2, 2])
