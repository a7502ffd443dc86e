"""The decoder beyond exact float32: half precision, rows without logits, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.paged_run import PagedRun, feed_in_chunks
from tests.support.tiny_models import load_ours, make_reference

TOKENS = list(range(3, 40))
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "mixtral"])
def test_bfloat16_stays_close_to_float32(name: str, tmp_path: Path) -> None:
    reference = make_reference(name)
    half = load_ours(reference, tmp_path, torch.bfloat16)
    ours = feed_in_chunks(PagedRun(half, 1, 40, dtype=torch.bfloat16), 0, TOKENS, chunk=9)
    with torch.inference_mode():
        exact = reference(torch.tensor([TOKENS])).logits[0]
    assert ours.dtype == torch.float32
    cosine = torch.nn.functional.cosine_similarity(ours, exact, dim=-1)
    assert float(cosine.median()) > 0.995  # an expert chosen by a hair may be another one at a few positions


def test_only_wanted_rows_have_hidden_states(tmp_path: Path) -> None:
    ours = load_ours(make_reference("llama"), tmp_path)
    everything = PagedRun(ours, 2, 40).feed({0: TOKENS, 1: TOKENS[:5]})
    last = PagedRun(ours, 2, 40).feed({0: TOKENS, 1: TOKENS[:5]}, every_logit=False)
    assert last.shape == (2, ours.vocab_size)
    torch.testing.assert_close(last, everything[[len(TOKENS) - 1, -1]])


def test_the_cache_is_written_in_place(tmp_path: Path) -> None:
    run = PagedRun(load_ours(make_reference("llama"), tmp_path), 1, 40)
    place = run.storage.layer(0).keys.data_ptr()
    run.feed({0: TOKENS})
    assert run.storage.layer(0).keys.data_ptr() == place
    used = run.storage.layer(0).keys.abs().sum((1, 3)).count_nonzero()  # slots with a key
    assert int(used) == len(TOKENS)


def test_a_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    ours = load_ours(make_reference("llama_tied"), tmp_path)
    assert ours.head.weight is ours.embedding.weight
