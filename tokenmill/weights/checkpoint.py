"""The interface of a checkpoint format: memory-mapped tensors under the checkpoint's own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tokenmill.ops.raw import RawTensor


class Checkpoint(Protocol):
    @property
    def place(self) -> str:
        """Path shown in errors: a file or a directory."""
        ...

    @property
    def files(self) -> Sequence[Path]:
        """Files that hold the tensors."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor in it."""
        ...

    def load(self, name: str) -> RawTensor:
        """Return one tensor, without a copy where the file allows it."""
        ...
