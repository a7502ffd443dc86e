"""Checkpoints with quantised matrices: a view in which each is one tensor under the name of the unquantised one.

A matrix's format is recognised by its tensors, not by the config, so one checkpoint may mix formats. Each format is a
module with a function `find`, which returns the matrices that it recognises as `StoredMatrix`.
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
# Scales of activations and of the KV cache, which the engine does not use.
_UNUSED = (
    ".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".k_scale",
    ".v_scale", ".q_scale", ".prob_scale", ".activation_scale",
)  # fmt: skip


class QuantizedCheckpoint:
    """A view of a checkpoint in which the parts of each quantised matrix are replaced by one tensor."""

    def __init__(self, inner: SafetensorsCheckpoint, config: Mapping[str, Any]) -> None:
        """`config`: the quantization_config of its config.json, already checked when the spec was read."""
        self._inner = inner
        self.matrices: dict[str, StoredMatrix] = {}
        for find in FORMATS:
            self.matrices |= find(inner, config)
        parts = {part for matrix in self.matrices.values() for part in matrix.parts}
        plain = (name for name in inner.shapes if name not in parts and not name.endswith(_UNUSED))
        self.shapes = {name: inner.shapes[name] for name in plain}
        self.shapes |= {name: matrix.shape for name, matrix in self.matrices.items()}
        self._last: RawTensor | None = None  # several of our tensors in a row may be parts of one of the checkpoint

    @property
    def place(self) -> str:
        return self._inner.place

    @property
    def files(self) -> Sequence[Path]:
        return self._inner.files

    @property
    def reads_parts(self) -> bool:
        return False  # a quantised matrix is always assembled completely

    def read_parts(self) -> None:
        """Do nothing: matrices are always read completely."""

    @property
    def has_rows_of_outputs(self) -> bool:
        """Return whether experts' matrices have their outputs in rows, even if the family's unquantised ones do not."""
        return any(part.endswith(mxfp4.BLOCKS) for matrix in self.matrices.values() for part in matrix.parts)

    def load(self, name: str) -> RawTensor:
        if name not in self.matrices:
            return self._inner.load(name)
        last = self._last
        if last is None or last.name != name:
            self._last = last = self.matrices[name].load(name)
        return last
