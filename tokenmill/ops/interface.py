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
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from tokenmill.arch.indexer import Indexer
from tokenmill.arch.spec import Activation, Gqa, MoeSpec, RoutingSpec
from tokenmill.ops.batch import ForwardBatch, LayerCache, Mode
from tokenmill.ops.compressed import WindowedInputs
from tokenmill.ops.low_rank import HeldExperts, LowRankOps
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache
from tokenmill.ops.streams import AltUpOps, HyperOps

Dense = Callable[[RawTensor], torch.Tensor]
"""Plain values of a raw tensor, in the compute dtype on the device."""


@dataclass(frozen=True)
class LinearWeight:
    """A matrix [rows, columns] packed by one backend; `packed` is that backend's own affair."""

    rows: int
    columns: int
    packed: Any
    bias: torch.Tensor | None = None  # [rows]
    whole_rows: int = 0  # of the matrix that this is a part of, on one of several ranks; 0: this is all of it


@dataclass(frozen=True)
class ExpertsWeight:
    """MLPs of all experts of a layer, packed by one backend."""

    num_experts: int  # those that every token goes through included
    packed: Any
    is_gated: bool = True
    gate_up_bias: torch.Tensor | None = None  # [experts, 2 * inter], of up alone where there is no gate
    down_bias: torch.Tensor | None = None  # [experts, H]
    num_shared: int = 0  # the last ones, which every token goes through with weight 1
    gather_inner: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Where ranks have some rows of each expert's matrices: what they computed of act(gate) * up → all of it"""
    gather_out: Callable[[torch.Tensor], torch.Tensor] | None = None  # likewise of the product with down
    sum_out: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Where ranks have some inner numbers of each expert: what they computed of each token's result [T, H] → the sum of
    all; for those who call `Ops.experts`, since it can be put off until all that is to be summed is there"""

    @property
    def has_bias(self) -> bool:
        return self.gate_up_bias is not None


class Routing(NamedTuple):
    """The rule by which experts are chosen and weighted; see `RoutingSpec`."""

    num_active: int
    spec: RoutingSpec = RoutingSpec()
    choice_bias: torch.Tensor | None = None  # float32 [experts]
    expert_scales: torch.Tensor | None = None  # float32 [experts]
    num_shared: int = 0  # experts behind those that are chosen from, which every token has with weight 1
    chosen: torch.Tensor | None = None  # int64 [T, k]: experts that were looked up, of which only the weights are open

    @property
    def is_plain(self) -> bool:
        """True for a softmax whose highest are taken, and divided by their sum or not."""
        return self.spec in (RoutingSpec(renormalize=True), RoutingSpec(renormalize=False))


@dataclass(frozen=True)
class AttentionArgs:
    """Parameters of one layer's attention, beside its tensors."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # float32 [heads]
    is_chunked: bool = False  # the window begins anew at its multiples


class Norm(NamedTuple):
    """An RMSNorm, or a LayerNorm where it is `centred`"""

    weight: torch.Tensor  # float32 [H]
    eps: float
    bias: torch.Tensor | None = None  # float32 [H]
    is_centred: bool = False  # the mean is subtracted

    @property
    def is_rms(self) -> bool:
        return not self.is_centred and self.bias is None


class ProjectionWeights(Protocol):
    """The attributes of a `Projection` (`models/linear.py`) that regions use."""

    @property
    def weight(self) -> LinearWeight: ...

    @property
    def is_self_contained(self) -> bool:
        """True where the product with `weight` is the whole result: no other rank has a part of it, no adapter adds
        to it. Fused regions take only such projections."""
        ...

    @property
    def is_adapted(self) -> bool:
        """True where an adapter may add to the product."""
        ...

    def __call__(self, x: torch.Tensor, mode: Mode, adapters: Any = None) -> torch.Tensor:
        """x [T, columns] → [T, rows], with what the tokens' adapters add; `adapters`: see `LowRankOps.plan`."""
        ...

    def gated(self, x: torch.Tensor, activation: Activation, mode: Mode, adapters: Any) -> torch.Tensor:
        """act(gate) * up [T, rows / 2] of the same, where the matrix is gates above ups"""
        ...


@dataclass(frozen=True)
class GatedMlpWeights:
    """down(act(gate(x)) * up(x)), gate and up as one matrix; down(act(up(x))) without a gate"""

    norm: Norm | None
    gate_up: ProjectionWeights
    down: ProjectionWeights
    activation: Activation
    post_norm: Norm | None = None  # of the result, before it is added to the stream
    is_gated: bool = True
    scale: float = 1.0  # multiplies what is added
    cutoff: float | None = None  # standard deviations above a token's mean from which on its gates count


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token goes through, weighted by the sigmoid of a gate of its own or by 1"""

    gate_up: ProjectionWeights
    down: ProjectionWeights
    activation: Activation
    gate: torch.Tensor | None  # float32 [H]
    is_gated: bool = True


@dataclass(frozen=True)
class MoeWeights:
    """A router, the experts it chooses from, and perhaps one for every token"""

    norm: Norm | None
    router: ProjectionWeights
    experts: ExpertsWeight
    spec: MoeSpec
    shared: SharedExpert | None = None
    post_norm: Norm | None = None
    choice_bias: torch.Tensor | None = None  # float32 [experts]
    expert_scales: torch.Tensor | None = None  # float32 [experts]
    router_norm: Norm | None = None  # the router's own norm of the stream
    latent: tuple[ProjectionWeights, ProjectionWeights] | None = None  # to what experts work on, and back
    scale: float = 1.0
    adapters: HeldExperts | None = None  # of the experts; None: none can be loaded
    table: torch.Tensor | None = None  # int64 [vocab, k]: experts by token, where they are looked up
    chosen: torch.Tensor | None = None  # int64 [T, k]: those of a step's tokens

    @cached_property
    def routing(self) -> Routing:
        shared = self.experts.num_shared
        return Routing(
            self.spec.num_active, self.spec.routing, self.choice_bias, self.expert_scales, shared, self.chosen
        )


@dataclass(frozen=True)
class SideBySideWeights:
    """An MLP and experts that read the same stream; both results are normed, added, and normed again"""

    mlp: GatedMlpWeights
    experts: MoeWeights
    post_norm: Norm | None
    scale: float = 1.0


FeedWeights = GatedMlpWeights | MoeWeights | SideBySideWeights


@dataclass(frozen=True)
class InputWeights:
    """up(act(gate(x)) * input), normed and added: `input` is the layer's own embedding of the token"""

    gate: ProjectionWeights
    up: ProjectionWeights
    norm: Norm
    activation: Activation


@dataclass(frozen=True)
class LayerWeights:
    """All weights of a layer but those that its mixer has for itself, in the order in which they are used"""

    norm: Norm | None
    project_in: ProjectionWeights  # the mixer's inputs: queries, keys and values as one matrix
    project_out: ProjectionWeights
    post_norm: Norm | None
    feed: FeedWeights | None  # None: nothing is fed behind the mixer
    scale: float = 1.0  # multiplies what the mixer adds
    is_parallel: bool = False  # the feed reads the stream that the mixer read
    add_input: InputWeights | None = None
    stream_scale: torch.Tensor | None = None  # [1]: multiplies the stream at the end
    side_out: ProjectionWeights | None = None  # of a second mixer, whose result is added too
    has_streams: bool = False  # around the layer: what it adds is asked for, and what it was given is needed again


class BatchClass(NamedTuple):
    """Batches that are computed in the same way, which is chosen when the model is loaded."""

    min_rows: int
    max_rows: int
    mode: Mode
    gathers: bool  # in the layer that goes on with the rows alone whose results are looked at


class AttendInputs(NamedTuple):
    """The inputs of one layer's attention"""

    qkv: torch.Tensor  # [T, (heads + 2 kv_heads) * D]; without keys and values where another layer's are read
    cache: LayerCache
    slots: torch.Tensor  # int64 [T], where the tokens' keys and values go
    norms: tuple[torch.Tensor, torch.Tensor] | None  # of queries and keys, [D] each
    eps: float
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None  # [T, rotary / 2] each
    plan: Any  # the backend's own, see `plan_attention`
    args: AttentionArgs
    spec: Gqa | None = None  # where more than that is to be done (`Gqa.is_plain`)
    growth: torch.Tensor | None = None  # float32 [T], what each token's queries are multiplied by


class LatentInputs(NamedTuple):
    """The inputs of one layer's latent attention; `rank` is the width of a token's latent vector"""

    queries: torch.Tensor  # [T, heads * (nope + rope)]
    entries: torch.Tensor  # [T, rank + rope]: a latent, not yet normed, and a key, not yet rotated
    latents: torch.Tensor  # the cache, [blocks, block_size, rank + rope]
    slots: torch.Tensor  # int64 [T], where the tokens' entries go
    norm: Norm  # of latents, [rank]
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None  # [T, rope / 2] each
    absorb: torch.Tensor  # [heads, rank, nope]: a query's part without rotation as one over latents
    expand: torch.Tensor  # [heads, value_dim, rank]: a mixture of latents as a head's value
    plan: Any  # the backend's own, see `plan_attention`
    scale: float
    choice: Any = None  # the entries that are looked at, as `choose_entries` says; None: all


class IndexInputs(NamedTuple):
    """The inputs of an indexer (`arch/indexer.py`), which chooses entries of latent attention"""

    queries: torch.Tensor  # [T, index heads * dim]
    keys: torch.Tensor  # [T, dim], neither normed nor rotated yet
    weights: torch.Tensor  # [T, index heads]
    kept: torch.Tensor  # the cache of keys, [blocks, block_size, dim]
    slots: torch.Tensor  # int64 [T], where the tokens' keys go
    norm: Norm  # of keys, a LayerNorm
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None  # [T, rope / 2] each
    plan: Any  # the backend's own, of the keys' cache group
    indexer: Indexer


Stream = Any
"""The residual stream between two regions, in a form that all regions of one backend share and nothing else reads."""


class ProjectAndAdd(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        projection: ProjectionWeights,
        stream: Stream,
        post_norm: Norm | None,
        scale: float = 1.0,
    ) -> Stream:
        """x [T, columns] times the matrix, normed if there is a norm, times a number, added to the stream"""
        ...


@dataclass(frozen=True)
class Regions:
    """The functions that compute one layer for batches of one class. A region may overwrite the stream it is given."""

    begin: Callable[[torch.Tensor], Stream]
    """[T, H] → the stream that begins with it"""
    norm_project: Callable[[Stream, Norm | None, ProjectionWeights], tuple[torch.Tensor, Stream]]
    """→ norm(stream), or the stream itself, times the matrix [T, rows]; the stream"""
    project: Callable[[torch.Tensor, ProjectionWeights], torch.Tensor]
    """x [T, columns] beside the stream, times the matrix [T, rows]"""
    attend: Callable[[AttendInputs], torch.Tensor]
    """Queries and keys are normed and rotated, keys and values written into the cache; queries over the context →
    [T, heads * D]. Mixers of other kinds have ops of their own."""
    gather: Callable[[Stream, torch.Tensor], Stream]
    """(stream of T rows, indices [L]) → the stream of those rows"""
    project_add: ProjectAndAdd
    gated_mlp: Callable[[Stream, GatedMlpWeights], Stream]
    """The MLP of the normed stream, added to it"""
    experts: Callable[[Stream, MoeWeights], Stream]
    """The chosen experts of the normed stream, added to it"""
    side_by_side: Callable[[Stream, SideBySideWeights], Stream]
    """An MLP and experts of the same stream, added to it"""
    project_and_feed: Callable[[torch.Tensor, ProjectionWeights, Stream, FeedWeights, float], Stream]
    """x times the matrix and what the feed makes of the stream, both added to it: a layer whose parts are parallel"""
    add_input: Callable[[Stream, torch.Tensor, InputWeights], Stream]
    """The layer's own embeddings [T, width] of the tokens, through a gate, added to the stream"""
    gated_input: Callable[[torch.Tensor, torch.Tensor, InputWeights], torch.Tensor]
    """(x [T, H], embeddings [T, width]) → what `add_input` would add to a stream of x"""
    whole: Callable[[Stream], torch.Tensor]
    """→ the stream as a tensor [T, H]"""
    added: Callable[[Stream], torch.Tensor]
    """→ what the last region added to the stream it was given [T, H]"""
    scale: Callable[[Stream, torch.Tensor], Stream]
    """The stream times a number [1]"""
    finish: Callable[[Stream, Norm], torch.Tensor]
    """→ norm(stream) [T, H]"""


class ChooseRegions(Protocol):
    def __call__(self, ops: Ops, layers: Sequence[LayerWeights], batch: BatchClass) -> list[Regions]:
        """Return the regions of each layer. Called when a model is loaded, for every class of batches."""
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


class PlanAttention(Protocol):
    def __call__(self, batch: ForwardBatch, group: int, window: int | None, *, is_chunked: bool = False) -> Any:
        """Return what `attention` of the layers of a cache group reads"""
        ...


class Recur(Protocol):
    def __call__(self, projected: torch.Tensor, cache: RecurrentCache, plan: Any, args: RecurrentArgs) -> torch.Tensor:
        """projected [T, q k v z (b) a] → normed and gated outputs [T, values]; cells and states of the step's tokens
        are written into `cache` where their tables have a block."""
        ...


class PackExperts(Protocol):
    def __call__(
        self,
        gate: RawTensor | None,
        up: RawTensor,
        down: RawTensor,
        dense: Dense,
        shared: tuple[RawTensor, RawTensor, RawTensor] | None = None,
    ) -> ExpertsWeight:
        """gate (or None) and up [experts, inter, H], down [experts, H, inter]. `shared`: gate, up and down of an MLP as
        wide as some experts, which every token goes through; a backend may make experts of it (`num_shared`), and
        leaves it to its caller otherwise."""
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
    pack_experts: PackExperts
    # ── once a step and KV group ──
    plan_attention: PlanAttention
    gather_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(tables [K, N, W], numbers [T]) → [K, T, W]: each token's row of every table"""
    # ── every layer ──
    embed: Callable[[torch.Tensor, LinearWeight], torch.Tensor]
    """ids [T] → [T, H]"""
    linear: Linear
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """(x [..., N], weight [N], eps); computed in float32, returned in x's dtype."""
    layer_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]
    """(x [..., N], weight [N], bias [N], eps): RMSNorm of x less its mean, plus the bias"""
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    """(x, residual, weight, eps) → (rms_norm(x + residual), x + residual)"""
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(x [T, heads, D], cos, sin [T, rotary / 2] float32): pairs (x[i], x[i + rotary / 2]) turn, the rest stays."""
    write_kv: Callable[[LayerCache, torch.Tensor, torch.Tensor, torch.Tensor], None]
    """(cache, keys, values [T, kv_heads, D], slots [T]); writes into the cache."""
    attention: Callable[[torch.Tensor, LayerCache, Any, AttentionArgs], torch.Tensor]
    """queries [T, heads, D] over the paged context → [T, heads * D]"""
    latent_attend: Callable[[LatentInputs], torch.Tensor]
    """Entries are normed, rotated and written into the cache; all heads over the entries of the context →
    [T, heads * value_dim]"""
    choose_entries: Callable[[IndexInputs], Any]
    """Index keys are normed, rotated and written into the cache → what `latent_attend` of this layer, and of those that
    share its index, looks at"""
    windowed_attend: Callable[[WindowedInputs], torch.Tensor]
    """Keys are normed, rotated and written into the cache, entries of several tokens made of them; queries over their
    windows and the entries before → [T, heads * head_dim]"""
    multiply_groups: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(x [T, groups, columns], matrices [groups, rows, columns]) → [T, groups * rows]"""
    plan_short_conv: Callable[[ForwardBatch, int, int], Any]
    """(batch, group, kernel) → what `short_conv` of this group's layers reads; once a step."""
    short_conv: ShortConvolve
    plan_recurrent: Callable[[ForwardBatch, int, int], Any]
    """(batch, group of cells, group of states) → what `recurrent` reads; once a step."""
    recurrent: Recur
    act_mul: Callable[[torch.Tensor, Activation], torch.Tensor]
    """[T, 2 * inter], gate then up → act(gate) * up"""
    cut_act_mul: Callable[[torch.Tensor, Activation, float], torch.Tensor]
    """The same of each token's gates less their mean and so many standard deviations, where that is positive"""
    activate: Callable[[torch.Tensor, Activation], torch.Tensor]
    """act(x), where there is no gate"""
    gate_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(y [T, H], x [T, H], gate float32 [H]) → each row of y times the sigmoid of its row x·gate"""
    route: Callable[[torch.Tensor, Routing], tuple[torch.Tensor, torch.Tensor]]
    """(router logits [T, experts], how) → float32 weights [T, k], int64 expert ids [T, k], shared experts last"""
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertsWeight, Activation], torch.Tensor]
    """(x [T, H], weights, ids, packed, activation) → weighted sum of the chosen experts [T, H]"""
    softcap: Callable[[torch.Tensor, float], torch.Tensor]
    """cap * tanh(x / cap)"""
    altup: AltUpOps
    hyper: HyperOps
    # ── layers, once at load ──
    choose_regions: ChooseRegions
    adapted_regions: Callable[[Ops, Mode, Any], Regions]
    """How every layer computes a batch in which some tokens use adapters; the last: `LowRankOps.plan` of them"""
    low_rank: LowRankOps
    row_borders: Callable[[torch.device], tuple[int, ...]] = no_row_borders
    """Numbers of rows from which on regions may be chosen otherwise on a device, ascending"""
    # ── where a backend has it ──
    joins_shared: bool = False  # `pack_experts` makes experts of an MLP that every token goes through, where it can
    argmax: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    """Logits of any precision [L, vocab] → see `BestLogits` of models"""
