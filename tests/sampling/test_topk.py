"""The blocked search for the k best finds what a plain topk finds."""

from __future__ import annotations

import pytest
import torch

from tokenmill.sampling.fixed_point import topk


@pytest.mark.parametrize("vocab", [16, 1000, 4096, 49152])
@pytest.mark.parametrize("k", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_values_and_places(vocab: int, k: int, dtype: torch.dtype) -> None:
    values = (torch.randn(4, vocab, generator=torch.Generator().manual_seed(k)) * 50).to(dtype)
    values[1] = 7  # all equal
    values[2, vocab // 2 :] = values[2].max() + 1  # equals in neighbouring blocks
    top, places = topk(values, k)
    assert torch.equal(top, values.topk(k, dim=-1).values)
    assert torch.equal(values.gather(1, places), top)
    assert all(len(set(row)) == k for row in places.tolist())
