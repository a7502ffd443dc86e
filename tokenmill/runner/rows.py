"""Permanent rows: what the runner remembers of a live sequence between steps. Steps bring changes only.

Block tables are int32 [groups, max_rows, max_blocks]; entries beyond a row's context are leftovers and never read as
keys that a query can see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenmill.models.pooling import Pooler
from tokenmill.types import BlockTableUpdate, RowInit


@dataclass(frozen=True)
class Row:
    prompt_token_ids: list[int]
    pooler: Pooler | None  # set when a vector is wanted, not tokens


class RowTable:
    def __init__(self, num_groups: int, max_rows: int, max_blocks: int) -> None:
        self.tables: NDArray[np.int32] = np.zeros((num_groups, max_rows, max_blocks), np.int32)
        self._live: dict[int, Row] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._live

    def __getitem__(self, row: int) -> Row:
        return self._live[row]

    def add(self, new: RowInit) -> None:
        """Takes a row, or takes it anew for another sequence's state (a fork, a resumed or reordered one)."""
        pooler = Pooler(new.pooling, len(new.prompt_token_ids)) if new.pooling else None
        self._live[new.row] = Row(new.prompt_token_ids, pooler)

    def free(self, row: int) -> None:
        del self._live[row]

    def update_tables(self, row: int, updates: Sequence[BlockTableUpdate]) -> None:
        for update in updates:
            self.tables[update.group, row, update.start : update.start + len(update.blocks)] = update.blocks
