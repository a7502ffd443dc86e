"""Parts of all ranks as one tensor, or their sum, for groups whose exchange leaves them apart."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch


class JoinedParts:
    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]: ...

    def join(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [T, widths[rank]] of this rank → [T, sum of widths]"""
        return torch.cat(self.all_gather(x, widths), dim=-1)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, W] of this rank → the sum of all ranks', added in their order and rounded once"""
        first, *others = self.all_gather(x, [x.shape[-1]] * self.size)
        total = first.float()
        for other in others:
            total = total + other
        return total.to(x.dtype)
