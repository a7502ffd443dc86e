"""The arithmetic a model is made of, as tables of plain functions that every backend fills in the same way.

`Ops` has the small operations: one product, one norm, one attention. `Regions` has what a layer is computed with: a few
of those at a time, over the residual stream. `ops/compose.py` builds every region from small ops; a backend replaces
those that it has fused kernels for. The choice is made when a model is loaded, for each layer and class of batches.

Shapes: T tokens of a step, H hidden size, heads * D query size, kv_heads * D key size. A function returns new tensors
unless it says otherwise. Weights reach a function in the form that the same backend's `pack_*` made of them; nothing
else looks inside. What a step has in common for all layers of a KV group is worked out once, by `plan_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from tokenmill.arch.spec import Activation, MoeSpec
from tokenmill.ops.batch import ForwardBatch, LayerCache, Mode
from tokenmill.ops.raw import RawTensor

Dense = Callable[[RawTensor], torch.Tensor]
"""Plain values of a raw tensor, in the compute dtype on the device."""


@dataclass(frozen=True)
class LinearWeight:
    """A matrix [rows, columns] packed by one backend; `packed` is that backend's own affair."""

    rows: int
    columns: int
    packed: Any
    bias: torch.Tensor | None = None  # [rows]


@dataclass(frozen=True)
class ExpertsWeight:
    """Gated MLPs of all experts of a layer, packed by one backend."""

    num_experts: int
    packed: Any


@dataclass(frozen=True)
class AttentionArgs:
    """What distinguishes one layer's attention from another's, beside its tensors."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # float32 [heads]


class Norm(NamedTuple):
    """An RMSNorm"""

    weight: torch.Tensor  # float32 [H]
    eps: float


class ProjectionWeights(Protocol):
    """What a region sees of a `Projection` of models."""

    @property
    def weight(self) -> LinearWeight: ...

    @property
    def is_self_contained(self) -> bool:
        """True where the product with `weight` is the whole result: no other rank has a part of it, no adapter adds
        to it. Fused regions take only such projections."""
        ...


@dataclass(frozen=True)
class GatedMlpWeights:
    """down(act(gate(x)) * up(x)), gate and up as one matrix"""

    norm: Norm
    gate_up: ProjectionWeights
    down: ProjectionWeights
    activation: Activation
    post_norm: Norm | None = None  # of the result, before it is added to the stream


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token goes through, weighted by the sigmoid of a gate of its own or by 1"""

    gate_up: ProjectionWeights
    down: ProjectionWeights
    activation: Activation
    gate: torch.Tensor | None  # float32 [H]


@dataclass(frozen=True)
class MoeWeights:
    """A router, the experts it chooses from, and perhaps one for every token"""

    norm: Norm
    router: ProjectionWeights
    experts: ExpertsWeight
    spec: MoeSpec
    shared: SharedExpert | None = None
    post_norm: Norm | None = None


FeedWeights = GatedMlpWeights | MoeWeights


@dataclass(frozen=True)
class LayerWeights:
    """All weights of a layer but those that its mixer has for itself, in the order in which they are used"""

    norm: Norm
    project_in: ProjectionWeights  # the mixer's inputs: queries, keys and values as one matrix
    project_out: ProjectionWeights
    post_norm: Norm | None
    feed: FeedWeights


class BatchClass(NamedTuple):
    """Batches that are computed in the same way, which is chosen when the model is loaded."""

    min_rows: int
    max_rows: int
    mode: Mode
    gathers: bool  # in the layer that goes on with the rows alone whose results are looked at


class AttendInputs(NamedTuple):
    """What attention of one layer is computed from"""

    qkv: torch.Tensor  # [T, (heads + 2 kv_heads) * D]
    cache: LayerCache
    slots: torch.Tensor  # int64 [T], where the tokens' keys and values go
    norms: tuple[torch.Tensor, torch.Tensor] | None  # of queries and keys, [D] each
    eps: float
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None  # [T, rotary / 2] each
    plan: Any  # the backend's own, see `plan_attention`
    args: AttentionArgs


Stream = Any
"""The residual stream between two regions, in a form that all regions of one backend share and nothing else reads."""


@dataclass(frozen=True)
class Regions:
    """How one layer computes batches of one class. A stream given to a region is used up by it."""

    begin: Callable[[torch.Tensor], Stream]
    """[T, H] → the stream that begins with it"""
    norm_project: Callable[[Stream, Norm, ProjectionWeights], tuple[torch.Tensor, Stream]]
    """→ norm(stream) times the matrix [T, rows]; the stream"""
    attend: Callable[[AttendInputs], torch.Tensor]
    """Queries and keys are normed and rotated, keys and values written into the cache; queries over the context →
    [T, heads * D]. Mixers of other kinds have ops of their own."""
    gather: Callable[[Stream, torch.Tensor], Stream]
    """(stream of T rows, indices [L]) → the stream of those rows"""
    project_add: Callable[[torch.Tensor, ProjectionWeights, Stream, Norm | None], Stream]
    """x [T, columns] times the matrix, normed if there is a norm, added to the stream"""
    gated_mlp: Callable[[Stream, GatedMlpWeights], Stream]
    """The MLP of the normed stream, added to it"""
    experts: Callable[[Stream, MoeWeights], Stream]
    """The chosen experts of the normed stream, added to it"""
    finish: Callable[[Stream, Norm], torch.Tensor]
    """→ norm(stream) [T, H]"""


class ChooseRegions(Protocol):
    def __call__(self, ops: Ops, layers: Sequence[LayerWeights], batch: BatchClass) -> list[Regions]:
        """One for each layer. Called when a model is loaded, for every class of batches."""
        ...


def no_row_borders(_device: torch.device) -> tuple[int, ...]:
    """Regions are the same for any number of rows."""
    return ()


class Linear(Protocol):
    def __call__(self, x: torch.Tensor, weight: LinearWeight, mode: Mode = "eager") -> torch.Tensor:
        """x [T, columns] → [T, rows]; `mode` may change which kernel multiplies, never what is multiplied."""
        ...


class ShortConvolve(Protocol):
    def __call__(
        self,
        projected: torch.Tensor,
        inputs: torch.Tensor,
        plan: Any,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """projected [T, 3 * width] (b, c, x) → c * conv(b * x) [T, width]; weight [width, kernel] and bias [width] in
        float32. Every token's b * x is written into `inputs` [blocks, block_size, width], where later steps read it."""
        ...


class GatedLinear(Protocol):
    def __call__(
        self, x: torch.Tensor, weight: LinearWeight, activation: Activation, mode: Mode = "eager"
    ) -> torch.Tensor:
        """act_mul(linear(x))"""
        ...


@dataclass(frozen=True)
class Ops:
    name: str
    # ── weights, once at load ──
    pack_linear: Callable[[Sequence[RawTensor], torch.Tensor | None, Dense], LinearWeight]
    """Matrices with the same input, stacked by rows in the order given; bias [all rows] or None."""
    pack_embedding: Callable[[RawTensor, Dense], LinearWeight]
    """A matrix that `embed` reads rows of; tied models multiply by it too."""
    pack_experts: Callable[[RawTensor, RawTensor, RawTensor, Dense], ExpertsWeight]
    """gate and up [experts, inter, H], down [experts, H, inter]."""
    # ── once a step and KV group ──
    plan_attention: Callable[[ForwardBatch, int, int | None], Any]
    """(batch, group, window) → what `attention` of this group's layers reads."""
    gather_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(tables [K, N, W], numbers [T]) → [K, T, W]: each token's row of every table"""
    # ── every layer ──
    embed: Callable[[torch.Tensor, LinearWeight], torch.Tensor]
    """ids [T] → [T, H]"""
    linear: Linear
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """(x [..., N], weight [N], eps); computed in float32, returned in x's dtype."""
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    """(x, residual, weight, eps) → (rms_norm(x + residual), x + residual)"""
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(x [T, heads, D], cos, sin [T, rotary / 2] float32): pairs (x[i], x[i + rotary / 2]) turn, the rest stays."""
    write_kv: Callable[[LayerCache, torch.Tensor, torch.Tensor, torch.Tensor], None]
    """(cache, keys, values [T, kv_heads, D], slots [T]); writes into the cache."""
    attention: Callable[[torch.Tensor, LayerCache, Any, AttentionArgs], torch.Tensor]
    """queries [T, heads, D] over the paged context → [T, heads * D]"""
    plan_short_conv: Callable[[ForwardBatch, int, int], Any]
    """(batch, group, kernel) → what `short_conv` of this group's layers reads; once a step."""
    short_conv: ShortConvolve
    act_mul: Callable[[torch.Tensor, Activation], torch.Tensor]
    """[T, 2 * inter], gate then up → act(gate) * up"""
    route: Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]
    """(router logits [T, experts], k, renormalize) → float32 weights [T, k], int64 expert ids [T, k]"""
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertsWeight, Activation], torch.Tensor]
    """(x [T, H], weights, ids, packed, activation) → weighted sum of the chosen experts [T, H]"""
    softcap: Callable[[torch.Tensor, float], torch.Tensor]
    """cap * tanh(x / cap)"""
    # ── layers, once at load ──
    choose_regions: ChooseRegions
    row_borders: Callable[[torch.device], tuple[int, ...]] = no_row_borders
    """Numbers of rows from which on regions may be chosen otherwise on a device, ascending"""
    # ── where a backend has it ──
    argmax: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    """Logits of any precision [L, vocab] → see `BestLogits` of models"""
