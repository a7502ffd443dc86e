"""Log-probabilities: the raw distribution's, in one defined order, for the rows that ask."""

from __future__ import annotations

import pytest
import torch

from tests.support.sampler_rows import draw_alone, new_row
from tokenmill.sampling import logprobs
from tokenmill.sampling.logprobs import prompt_logprobs


def test_values_rank_and_order() -> None:
    logits = torch.randn(9, 301, generator=torch.Generator().manual_seed(0))
    logits[:, ::3] = logits[:, :1]  # many equals
    targets = [0, 3, 300, 17, 18, 19, 20, 21, 22]
    exact = logits.double().log_softmax(-1)
    for position, found in enumerate(prompt_logprobs(logits, targets, 150)):
        row = logits[position].tolist()
        order = sorted(range(301), key=lambda i: (-row[i], i))
        assert found.token_id == targets[position]
        assert found.rank == 1 + order.index(found.token_id)
        assert found.logprob == pytest.approx(exact[position, found.token_id].item(), abs=1e-5)
        assert found.top_ids == order[:150]
        assert found.top_logprobs == pytest.approx(exact[position, order[:150]].tolist(), abs=1e-5)


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(20, 1000, generator=torch.Generator().manual_seed(1))
    whole = prompt_logprobs(logits, list(range(20)), 5)
    monkeypatch.setattr(logprobs, "_SLICE_ELEMENTS", 3000)
    assert prompt_logprobs(logits, list(range(20)), 5) == whole


def test_no_alternatives_and_more_than_the_vocabulary_has() -> None:
    logits = torch.tensor([[1.0, 2.0, -torch.inf]])
    none, everything = prompt_logprobs(logits, [0], 0)[0], prompt_logprobs(logits, [2], 50)[0]
    assert (none.rank, none.top_ids, none.top_logprobs) == (2, [], [])
    assert (everything.rank, everything.logprob) == (3, -torch.inf)
    assert everything.top_ids == [1, 0, 2]


def test_knobs_do_not_change_them() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(2))
    plain_row = draw_alone(logits, new_row(temperature=0.0), num_logprobs=4).logprobs
    assert plain_row is not None
    banned = draw_alone(logits, new_row(temperature=0.2, banned_token_ids=plain_row.top_ids[:1]), num_logprobs=4)
    assert banned.logprobs is not None
    assert banned.logprobs.top_ids == plain_row.top_ids
    assert banned.logprobs.top_logprobs == plain_row.top_logprobs
    assert banned.logprobs.rank > 1


def test_none_for_rows_that_do_not_ask() -> None:
    assert draw_alone(torch.zeros(5), new_row()).logprobs is None
