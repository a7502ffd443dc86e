"""Checkpoints with MXFP4 matrices (gpt-oss): numbers of 4 bits, and a power of two for each 32 of them.

    X_blocks [..., rows, groups, 16]   two numbers a byte, the first in the low nibble
    X_scales [..., rows, groups]       exponents, 127 too high

The same numbers are handed on in GGUF's blocks, which every backend knows: an exponent, then 16 bytes whose low nibbles
are the first half of the group. Nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tokenmill.errors import DamagedFile
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.checkpoint import SafetensorsCheckpoint

GROUP, BYTES = 32, 16
BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4Checkpoint:
    """A view of a checkpoint with `X` in place of `X_blocks` and `X_scales`."""

    def __init__(self, inner: SafetensorsCheckpoint) -> None:
        self._inner = inner
        found = [name.removesuffix(BLOCKS) for name in inner.shapes if name.endswith(BLOCKS)]
        parts = {name + part for name in found for part in (BLOCKS, SCALES)}
        self.matrices = {name: self._shape(name) for name in found}
        self.shapes = {name: shape for name, shape in inner.shapes.items() if name not in parts} | self.matrices
        self._last: RawTensor | None = None  # gate and up are one tensor, and asked for one after the other

    @property
    def place(self) -> str:
        return self._inner.place

    @property
    def files(self) -> Sequence[Path]:
        return self._inner.files

    def load(self, name: str) -> RawTensor:
        if name not in self.matrices:
            return self._inner.load(name)
        last = self._last
        if last is None or last.name != name:
            blocks, scales = (self._inner.tensor(name + part) for part in (BLOCKS, SCALES))
            last = RawTensor(name, self.matrices[name], as_gguf_blocks(blocks, scales), "MXFP4")
            self._last = last
        return last

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the values, after a check that both parts fit together."""
        blocks, scales = (self._inner.shapes.get(name + part, ()) for part in (BLOCKS, SCALES))
        if len(blocks) < 3 or blocks[-1] != BYTES or blocks[:-1] != scales:
            raise DamagedFile(
                f"{self.place}: the parts of {name!r} do not fit together: blocks {list(blocks)}, scales {list(scales)}"
            )
        return (*blocks[:-2], blocks[-2] * GROUP)


def as_gguf_blocks(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [..., groups, 16] and [..., groups] → uint8 [..., groups * 17]"""
    blocks, scales = blocks.view(torch.uint8), scales.view(torch.uint8)
    out = torch.empty(*scales.shape, BYTES + 1, dtype=torch.uint8)
    out[..., 0] = scales
    # byte j has numbers 2j and 2j + 1; ours has numbers k and k + 16
    low, high = blocks & 15, blocks >> 4
    half = BYTES // 2
    out[..., 1::2] = low[..., :half] | (low[..., half:] << 4)
    out[..., 2::2] = high[..., :half] | (high[..., half:] << 4)
    return out.flatten(-2)
