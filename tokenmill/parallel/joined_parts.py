"""Parts of all ranks as one tensor, for groups whose exchange leaves them apart."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch


class JoinedParts:
    @abstractmethod
    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]: ...

    def join(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [T, widths[rank]] of this rank → [T, sum of widths]"""
        return torch.cat(self.all_gather(x, widths), dim=-1)
