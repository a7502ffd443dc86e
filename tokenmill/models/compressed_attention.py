"""Attention over a sliding window and compressed entries (DeepSeek V4) as a layer's mixer.

It owns the norms, the sinks, the gate biases, the matrices that expand the query latent, and the grouped output
projection; the layer's input and final output projections belong to the layer.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tokenmill.arch.regions import Matrices
from tokenmill.arch.spec import WindowedMqa
from tokenmill.models.forward_context import ForwardContext
from tokenmill.models.linear import Loader, form_of
from tokenmill.ops.compressed import CachedField, EntryWeights, WindowedInputs, WindowedWeights
from tokenmill.ops.interface import Regions


class WindowedMixer:
    def __init__(self, spec: WindowedMqa, name: str, layer: int, load: Loader) -> None:
        self.spec = spec
        self._ops = load.ops
        self._layer = layer
        self._q_norm = load.norm(f"{name}.q_norm", spec.norm_eps)
        self._q_up = load.projection(Matrices((f"{name}.q_up",)))
        indexer = spec.compression and spec.compression.indexer
        self._index_q = load.projection(Matrices((f"{name}.index_q",))) if indexer else None
        groups = load.dense(load.source.get(f"{name}.out_groups.weight"))
        self._out_groups = groups.view(spec.out_groups, spec.out_rank, -1)
        self._weights = WindowedWeights(
            load.vector(f"{name}.kv_norm.weight"),
            load.vector(f"{name}.sinks"),
            _entry_weights(f"{name}.entry", load) if spec.compression else None,
            _entry_weights(f"{name}.index", load) if indexer else None,
        )

    @property
    def kind(self) -> Hashable:
        return self.spec, form_of((self._q_norm, self._q_up, self._index_q, self._out_groups, self._weights))

    def attend(self, projected: torch.Tensor, step: ForwardContext, regions: Regions) -> torch.Tensor:
        """Stacked projections, in the order of `spec.projected_parts` → [T, out_groups * out_rank]"""
        spec = self.spec
        parts = _parts(spec, projected)
        latent = self._ops.rms_norm(parts["q_down"].contiguous(), self._q_norm.weight, self._q_norm.eps)
        index_q = None if self._index_q is None else self._index_q(latent, step.batch.mode, step.adapters)
        inputs = WindowedInputs(
            step.batch,
            self._q_up(latent, step.batch.mode, step.adapters),
            parts["kv"],
            step.ropes[spec.rope].cos_sin,
            self._field("entries", step),
            parts.get("entry"),
            self._fields("", step) if spec.compression else None,
            parts.get("index"),
            None if index_q is None else self._fields("index_", step),
            index_q,
            parts.get("index_weights"),
            self._weights,
            spec,
        )
        heads = self._ops.windowed_attend(inputs).view(len(projected), spec.out_groups, -1)
        return self._ops.multiply_groups(heads, self._out_groups)

    def _fields(self, prefix: str, step: ForwardContext) -> tuple[CachedField, CachedField]:
        return self._field(f"{prefix}inputs_of_entries", step), self._field(f"{prefix}compressed", step)

    def _field(self, name: str, step: ForwardContext) -> CachedField:
        group = step.storage.group(self._layer, name)
        return CachedField(step.storage.fields(self._layer)[name], step.batch.groups[group])


def _entry_weights(name: str, load: Loader) -> EntryWeights:
    return EntryWeights(load.vector(f"{name}_bias"), load.vector(f"{name}_norm.weight"))


def _parts(spec: WindowedMqa, projected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split the stacked projections by name; the values and gates of compressed entries stay together."""
    sizes: dict[str, int] = {}
    for name, size in spec.projected_parts:
        name = name.removesuffix("_values").removesuffix("_gates")
        sizes[name] = sizes.get(name, 0) + size
    return dict(zip(sizes, torch.split(projected, list(sizes.values()), dim=1), strict=True))
