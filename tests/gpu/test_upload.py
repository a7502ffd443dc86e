"""Weights on their way to a GPU: every byte arrives, from several threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tokenmill.weights.upload import PIECE_BYTES, to_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_tensors_of_every_size_arrive() -> None:
    device = torch.device("cuda")
    sizes = [1, PIECE_BYTES // 2 - 1, PIECE_BYTES // 2, PIECE_BYTES + 3, 3 * PIECE_BYTES]
    tensors = [torch.randint(-1000, 1000, (size,), dtype=torch.int16) for size in sizes * 3]
    tensors.append(torch.randn(2000, 9000).t())  # not contiguous
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda tensor: to_gpu(tensor, device), tensors))
    assert all(torch.equal(there.cpu(), here) for there, here in zip(found, tensors, strict=True))
