"""The group of a rank that has all rows of its matrices: nothing is gathered."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.parallel.joined_parts import JoinedParts


class Alone(JoinedParts):
    rank = 0
    size = 1

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        return [x]

    def abort(self) -> None:
        """Do nothing: no other rank waits for this one."""

    def close(self) -> None:
        pass
