"""The k best of each row, without looking at the whole vocabulary k times.

The k best tokens lie in the k blocks with the highest maxima. Maxima of blocks of 16 are one fast pass; what is then
searched is a sixteenth of the vocabulary, and after it k blocks. Which of several equals is returned is not defined:
callers use the values, or settle ties themselves.
"""

from __future__ import annotations

from torch import Tensor

from tokenmill.sampling.fixed_point import ROW_ALIGNMENT


def best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest values of each row of [U, V], highest first, and where they stand: both [U, k]."""
    num_rows, vocab = values.shape
    if vocab % ROW_ALIGNMENT or 4 * k * ROW_ALIGNMENT > vocab:
        return _topk(values, k)
    blocks = values.view(num_rows, -1, ROW_ALIGNMENT)
    _, chosen = _topk(blocks.amax(dim=-1), k)  # [U, k] blocks
    inside = blocks.gather(1, chosen.unsqueeze(2).expand(-1, -1, ROW_ALIGNMENT))  # [U, k, 16]
    top, place = _topk(inside.flatten(1), k)
    block = chosen.gather(1, place // ROW_ALIGNMENT)
    return top, block * ROW_ALIGNMENT + place % ROW_ALIGNMENT


def _topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found = values.topk(k, dim=-1)
    return found.values, found.indices
