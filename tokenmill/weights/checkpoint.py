"""What a file format offers: tensors under the checkpoint's own names, memory-mapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tokenmill.ops.raw import RawTensor


class Checkpoint(Protocol):
    @property
    def place(self) -> str:
        """What errors call it: a file or a directory."""
        ...

    @property
    def files(self) -> Sequence[Path]:
        """The files that hold the tensors."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor in it."""
        ...

    def load(self, name: str) -> RawTensor:
        """One tensor, without copying where the file allows it."""
        ...
