"""Checkpoints with quantised matrices: a view in which each of them is one tensor under the name of a plain one.

A matrix is recognised by the tensors that are there, not by what the config says of all, so one checkpoint may mix
formats. Each format is a module with a `find`: the matrices that it recognises, as `StoredMatrix`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenmill.ops.raw import RawTensor
from tokenmill.weights import bitsandbytes, compressed_tensors, fp8, group_quantized, hqq, mxfp4, nvfp4
from tokenmill.weights.checkpoint import SafetensorsCheckpoint
from tokenmill.weights.stored_matrix import StoredMatrix

Find = Callable[[SafetensorsCheckpoint, Mapping[str, Any]], dict[str, StoredMatrix]]
FORMATS: tuple[Find, ...] = (
    group_quantized.find,
    compressed_tensors.find,
    nvfp4.find,
    mxfp4.find,
    fp8.find,
    bitsandbytes.find,
    hqq.find,
)
# Scales of activations and of the KV cache, which are computed as they are here.
_UNUSED = (
    ".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".k_scale",
    ".v_scale", ".q_scale", ".prob_scale", ".activation_scale",
)  # fmt: skip


class QuantizedCheckpoint:
    """A view of a checkpoint with plain names in the place of the parts of quantised matrices."""

    def __init__(self, inner: SafetensorsCheckpoint, config: Mapping[str, Any]) -> None:
        """`config`: the quantization_config of its config.json, which the reader of the spec has checked."""
        self._inner = inner
        self.matrices: dict[str, StoredMatrix] = {}
        for find in FORMATS:
            self.matrices |= find(inner, config)
        parts = {part for matrix in self.matrices.values() for part in matrix.parts}
        plain = (name for name in inner.shapes if name not in parts and not name.endswith(_UNUSED))
        self.shapes = {name: inner.shapes[name] for name in plain}
        self.shapes |= {name: matrix.shape for name, matrix in self.matrices.items()}
        self._last: RawTensor | None = None  # one tensor of theirs may be several of ours, asked for one after another

    @property
    def place(self) -> str:
        return self._inner.place

    @property
    def files(self) -> Sequence[Path]:
        return self._inner.files

    @property
    def reads_parts(self) -> bool:
        return False  # the parts of a quantised matrix are put together as a whole

    def read_parts(self) -> None:
        """Matrices are read as a whole here."""

    @property
    def has_rows_of_outputs(self) -> bool:
        """Experts' matrices lie with their outputs in rows, also where the family's plain ones do not."""
        return any(part.endswith(mxfp4.BLOCKS) for matrix in self.matrices.values() for part in matrix.parts)

    def load(self, name: str) -> RawTensor:
        if name not in self.matrices:
            return self._inner.load(name)
        last = self._last
        if last is None or last.name != name:
            self._last = last = self.matrices[name].load(name)
        return last
