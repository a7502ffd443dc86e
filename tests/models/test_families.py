"""Every family through the paged path, against transformers: logits, greedy tokens, chunks, neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.paged_run import PagedRun, feed_in_chunks, greedy
from tests.support.tiny_models import FAMILIES, VOCAB, load_ours, make_reference
from tokenmill.models.decoder import Decoder


@dataclass(frozen=True)
class Pair:
    ours: Decoder
    theirs: transformers.PreTrainedModel

    def their_logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.theirs(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    reference = make_reference(request.param)
    directory: Path = tmp_path_factory.mktemp(request.param)
    yield Pair(load_ours(reference, directory), reference)


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_logits_equal_transformers(pair: Pair, chunk: int) -> None:
    tokens = random_tokens(45, seed=1)
    run = PagedRun(pair.ours, num_rows=2, max_len=48, block_size=4)
    assert relative_difference(feed_in_chunks(run, 1, tokens, chunk), pair.their_logits(tokens)) < 1e-4


def test_64_greedy_tokens_equal_transformers(pair: Pair) -> None:
    prompt = random_tokens(21, seed=2)
    found = greedy(PagedRun(pair.ours, num_rows=1, max_len=96, block_size=16), 0, prompt, 64, chunk=8)
    # Each of our tokens is the reference's first choice after the same tokens: the sequences are equal.
    expected = pair.their_logits(prompt + found)[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert found == expected
    assert len(set(found)) > 8, "a sequence that repeats itself proves little"


def test_rows_in_one_batch_are_independent(pair: Pair) -> None:
    """Three rows at different points, one decoding, two in chunks: each as it is alone."""
    rows = [random_tokens(count, seed=count) for count in (30, 17, 40)]
    run = PagedRun(pair.ours, num_rows=3, max_len=48, block_size=4)
    run.feed({0: rows[0][:-1]})
    run.feed({2: rows[2][:9]})
    together = torch.log_softmax(run.feed({2: rows[2][9:], 0: rows[0][-1:], 1: rows[1]}), -1)
    alone = [torch.log_softmax(feed_in_chunks(PagedRun(pair.ours, 1, 48), 0, row, 64), -1) for row in rows]
    expected = torch.cat([alone[2][9:], alone[0][-1:], alone[1]])
    assert float((together - expected).abs().max()) < 3e-5  # torch adds up in another order for other numbers of rows
