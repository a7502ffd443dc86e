"""The matrices of a model: `Projection` multiplies by a packed weight, `Loader` creates projections from a checkpoint.

A projection is a product [T, columns] → [T, rows]. The backend chooses at load how the matrix is packed (plain, fp8,
4 bits), and per call which kernel multiplies, by the number of rows and the mode. A projection also hides two things
from the layers: the exchange between ranks that hold parts of the matrix (`parallel/`), and the low-rank products of
LoRA adapters (`ops/low_rank.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from tokenmill.arch.regions import Matrices
from tokenmill.arch.spec import RMS_NORM, Activation, NormSpec
from tokenmill.models.protocol import WeightReader
from tokenmill.ops.batch import Mode
from tokenmill.ops.blocks import is_known
from tokenmill.ops.interface import LinearWeight, Norm, Ops
from tokenmill.ops.low_rank import ExpertsShape, HeldExperts, HeldLowRank, LowRank
from tokenmill.ops.raw import RawTensor
from tokenmill.parallel.cuts import Span
from tokenmill.parallel.group import Gather, GatherRows, Shard, Sum
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.upload import to_gpu

Part = TypeVar("Part")
NUM_READER_THREADS = 4


@dataclass(frozen=True)
class Projection:
    ops: Ops
    weight: LinearWeight
    adapters: HeldLowRank | None = None  # None: no adapter can be loaded
    inputs: Gather | None = None  # gathers x from the ranks, where each rank computed a part of it
    outputs: Gather | Sum | None = None  # gathers the product from the ranks, or sums it over them
    lookups: GatherRows | None = None  # exchanges looked-up rows, where each rank holds some rows of an embedding

    def __call__(self, x: torch.Tensor, mode: Mode, adapters: Any = None) -> torch.Tensor:
        """x [T, columns] → [T, rows]; `adapters`: the plan that says which token uses which (`LowRankOps.plan`)"""
        x = x if self.inputs is None else self.inputs(x)
        held = self.adapters
        if adapters is None or held is None:
            out = self.ops.linear(x, self.weight, mode)
        elif (whole := held.product(x, self.weight, adapters)) is not None:
            out = whole
        else:
            out = self.ops.linear(x, held.matrix(self.weight, adapters), mode)
            out = held.add(x, out, self.weight.bias, adapters)
        return out if self.outputs is None else self.outputs(out)

    def gated(self, x: torch.Tensor, activation: Activation, mode: Mode, adapters: Any) -> torch.Tensor:
        """Return act(gate) * up with adapters; gate rows are stacked above up rows: [T, columns] → [T, rows / 2]."""
        held = self.adapters
        if held is None or self.outputs is not None:
            return self.ops.act_mul(self(x, mode, adapters), activation)
        x = x if self.inputs is None else self.inputs(x)
        whole = held.product(x, self.weight, adapters)
        if whole is not None:
            return self.ops.act_mul(whole, activation)
        out = self.ops.linear(x, held.matrix(self.weight, adapters), mode)
        return held.add_gated(x, out, self.weight.bias, adapters, activation)

    def rows(self, numbers: torch.Tensor, adapters: Any = None) -> torch.Tensor:
        """Look up rows of the matrix, as an embedding: [T] → [T, columns]"""
        if self.lookups is not None:
            out = self.lookups(numbers, self.ops.embed(self.lookups.own(numbers), self.weight))
        else:
            out = self.ops.embed(numbers, self.weight)
        if adapters is None or self.adapters is None:
            return out
        return self.adapters.add_rows(numbers, out, adapters)

    @property
    def is_adapted(self) -> bool:
        return self.adapters is not None and self.adapters.is_active

    @property
    def is_self_contained(self) -> bool:
        return self.inputs is None and self.outputs is None


@dataclass(frozen=True)
class Loader:
    """Reads weights by our tensor names and packs them with the ops that will use them."""

    source: WeightReader
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    slots: AdapterSlots = field(default_factory=lambda: AdapterSlots(0))
    shard: Shard | None = None  # None: this rank holds the whole model

    def dense(self, raw: RawTensor) -> torch.Tensor:
        """Return dequantised values in the compute dtype, on the device."""
        if self.device.type == "cuda" and (raw.quant is None or is_known(raw.quant)):
            raw = replace(raw, data=to_gpu(raw.data, self.device))  # dequantise on the GPU, where it is nearly free
        return dequantize(raw, self.dtype).to(self.device)

    def each(self, make: Callable[[int], Part], count: int) -> list[Part]:
        """Make parts 0 to count - 1 of a model; for a GPU several are read and copied at the same time."""
        if self.device.type != "cuda":
            return [make(number) for number in range(count)]
        with ThreadPoolExecutor(NUM_READER_THREADS) as readers:
            return list(readers.map(make, range(count)))

    def vector(self, name: str) -> torch.Tensor:
        """Load a vector (norm weights, biases, sinks) in float32: it is small, so the precision costs nothing."""
        return dequantize(self.source.get(name), torch.float32).to(self.device)

    def norm(self, name: str, eps: float, spec: NormSpec = RMS_NORM, width: int = 0) -> Norm:
        """Load a norm; `width` is its number of values, which a norm without a weight does not tell."""
        bias = self.vector(f"{name}.bias") if spec.has_bias else None
        weight = self.vector(f"{name}.weight") if spec.has_weight else torch.ones(width, device=self.device)
        return Norm(weight, eps, bias, spec.kind == "layer")

    def projection(self, matrices: Matrices) -> Projection:
        """Load matrices `<name>.weight` that share an input as one projection, stacked by rows."""
        names = matrices.names
        bias = torch.cat([self.vector(f"{name}.bias") for name in names]).to(self.dtype) if matrices.has_bias else None
        raws = [self.source.get(f"{name}.weight") for name in names]
        weight = self.ops.pack_linear(raws, bias, self.dense)
        adapters = self._adapters(names, [raw.shape[0] for raw in raws], weight.columns, cut_like=names)
        made = Projection(self.ops, weight if adapters is None else adapters.adopt(weight), adapters)
        shard = self.shard
        if shard is None:
            return made
        made = replace(made, weight=replace(made.weight, whole_rows=shard.whole_rows(names)))
        outputs = shard.finish_outputs(names, [raw.shape[0] for raw in raws])
        return replace(made, inputs=shard.gather_inputs(names[0]), outputs=outputs)

    def embedding(self, name: str) -> Projection:
        """Load a projection whose rows are looked up; models with tied weights also multiply by it."""
        weight = self.ops.pack_embedding(self.source.get(f"{name}.weight"), self.dense)
        # An adapter of an embedding adds a vector of `columns` values to each looked-up row.
        whole_rows = 0 if self.shard is None else self.shard.whole_rows((name,))
        adapters = self._adapters((name,), [weight.columns], whole_rows or weight.rows, is_embedding=True)
        lookups = None if self.shard is None else self.shard.gather_rows(name)
        weight = replace(weight, whole_rows=whole_rows)
        return Projection(self.ops, weight, adapters, lookups=lookups)

    def tied_head(self, embedding: Projection) -> Projection:
        """Return the head as a product with the embedding's matrix; its adapters are separate from the embedding's."""
        adapters = self._adapters(("head",), [embedding.weight.rows], embedding.weight.columns, cut_like=("embed",))
        outputs = None if self.shard is None else self.shard.finish_outputs(("embed",))
        return replace(embedding, adapters=adapters, outputs=outputs)

    def _adapters(
        self,
        names: tuple[str, ...],
        sizes: list[int],
        columns: int,
        *,
        cut_like: tuple[str, ...] = (),
        is_embedding: bool = False,
    ) -> HeldLowRank | None:
        """`cut_like`: the matrices whose row ranges on this rank also apply to the adapters' rows."""
        if not self.slots.number:
            return None
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        slots = self.slots
        held = self.ops.low_rank.hold(
            tuple(sizes), columns, slots.number, slots.max_rank, like, is_embedding=is_embedding
        )
        rows = tuple(
            None if self.shard is None else self.shard.own_rows(name) for name in cut_like or ("",) * len(names)
        )
        self.slots.held.append(ProjectionSlots(names, rows, held))
        return held

    def expert_adapters(
        self, names: ExpertNames, up_shape: tuple[int, ...], shared: ExpertNames | None = None, num_shared: int = 0
    ) -> HeldExperts | None:
        """Create adapter slots for experts' gates, ups and downs. `shared`: the names of a shared expert's matrices,
        which is appended to the routed experts as `num_shared` more."""
        if not self.slots.number:
            return None
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        count, inter, hidden = up_shape
        shape = ExpertsShape(count + num_shared, hidden, inter, names[0] is not None)
        rank = 0 if self.shard is not None else self.slots.expert_rank  # no kernels for experts cut over ranks
        held = self.ops.low_rank.hold_experts(shape, self.slots.number, rank, like)
        if held is not None:
            self.slots.held_experts.append(ExpertSlots(names, count, held, shared, num_shared))
        return held


class ProjectionSlots(NamedTuple):
    """The adapter slots of one projection, that is of some stacked matrices."""

    names: tuple[str, ...]
    rows: tuple[Span | None, ...]  # the rows of each matrix that this rank holds; None: all of them
    slots: HeldLowRank

    def parts(self, matrices: Mapping[str, LowRank]) -> list[LowRank | None]:
        """Return this rank's rows of an adapter's low-rank product for each matrix."""
        return [
            None if (part := matrices.get(name)) is None else part if rows is None else part.some_rows(*rows)
            for name, rows in zip(self.names, self.rows, strict=True)
        ]


ExpertNames = tuple[str | None, str, str]  # names of the gate (None: no gate), up and down matrices


@dataclass(frozen=True)
class ExpertSlots:
    """The adapter slots of a layer's experts."""

    names: ExpertNames
    count: int
    held: HeldExperts
    shared: ExpertNames | None = None  # of a shared expert that is appended to the routed experts
    num_shared: int = 0

    def matrices(self) -> set[str]:
        found = {f"{name}.{expert}" for name in self.names if name for expert in range(self.count)}
        return found | {name for name in self.shared or () if name}

    def put(self, slot: int, matrices: Mapping[str, LowRank]) -> bool:
        own = [tuple(matrices.get(f"{name}.{expert}") for name in self.names) for expert in range(self.count)]
        if self.shared is not None:
            gate, up, down = (matrices.get(str(name)) for name in self.shared)
            own += [
                (self._rows(gate, number), self._rows(up, number), self._columns(down, number))
                for number in range(self.num_shared)
            ]
        return self.held.put(slot, [(gate, up, down) for gate, up, down in own])

    def _rows(self, part: LowRank | None, number: int) -> LowRank | None:
        """Cut an adapter of the shared expert's gate or up: the rows that appended expert `number` holds."""
        if part is None:
            return None
        size = len(part.b) // self.num_shared
        rows = slice(number * size, (number + 1) * size)
        return LowRank(part.a, part.b[rows], None if part.gain is None else part.gain[rows])

    def _columns(self, part: LowRank | None, number: int) -> LowRank | None:
        """Cut an adapter of the shared expert's down: the columns that appended expert `number` holds.

        The experts' outputs are summed, which completes the product.
        """
        if part is None:
            return None
        size = part.a.shape[1] // self.num_shared
        return LowRank(part.a[:, number * size : (number + 1) * size], part.b, part.gain)


@dataclass
class AdapterSlots:
    """The adapter slots of a model, over all its matrices."""

    number: int  # of slots; 0: no adapter can be loaded
    max_rank: int = 0
    expert_rank: int = 0  # the largest rank of an adapter of experts; 0: no such adapter was configured at load
    version: int = 0  # changes when steps with adapters start to launch other kernels
    held: list[ProjectionSlots] = field(default_factory=list)
    held_experts: list[ExpertSlots] = field(default_factory=list)

    def names(self) -> set[str]:
        """Return the names of the matrices that adapters may change."""
        found = {name for held in self.held for name in held.names}
        return found.union(*(experts.matrices() for experts in self.held_experts))

    def put(self, slot: int, matrices: Mapping[str, LowRank]) -> None:
        """Store an adapter in a slot, numbered from 1, replacing its previous one."""
        for held in self.held:
            self.version += held.slots.put(slot, held.parts(matrices))
        for experts in self.held_experts:
            self.version += experts.put(slot, matrices)


def form_of(weights: Any) -> Hashable:
    """Return a key of all properties of weights that select kernels: shapes, dtypes, strides, alignment, packing."""
    if isinstance(weights, torch.Tensor):
        return weights.dtype, weights.shape, weights.stride(), weights.data_ptr() % 16
    if isinstance(weights, tuple):
        return tuple(map(form_of, weights))
    if isinstance(weights, Projection):
        return form_of(weights.weight), weights.is_self_contained
    if is_dataclass(weights):
        names = (one.name for one in fields(weights) if one.name != "adapters")  # adapters launch their own kernels
        return type(weights), *(form_of(getattr(weights, name)) for name in names)
    form: Hashable = weights
    return form
