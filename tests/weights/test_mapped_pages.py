"""Parts of tensors that are asked for as they lie, in whatever order their numbers are."""

from __future__ import annotations

import pytest
import torch

from tokenmill.weights.mapped_pages import fetch

WHOLE = torch.zeros(4, 6, 8)


@pytest.mark.parametrize(
    "part",
    [WHOLE, WHOLE[:, 1:3], WHOLE.transpose(1, 2), WHOLE[:, ::2].transpose(1, 2), WHOLE[..., ::2], WHOLE[0, 0, ::2],
     WHOLE.transpose(0, 2), WHOLE[:0]],
)  # fmt: skip
def test_any_part_can_be_fetched(part: torch.Tensor) -> None:
    fetch(part)
    assert not part.any()
