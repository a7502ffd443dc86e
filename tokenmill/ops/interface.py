"""The interface of a backend: tables of functions, `Ops` and `Regions`, that every backend fills in the same way.

`Ops` has the small operations: a product, a norm, attention. `Regions` has the parts of a layer, which combine a few of
these over the residual stream. `ops/compose.py` builds every region from small ops; a backend replaces those for which
it has fused kernels. The choice is made when a model is loaded, for each layer and batch class.

Shapes: T tokens of a step, H hidden size, heads * D query size, kv_heads * D key size. A function returns new tensors
unless stated otherwise. A function receives weights as packed by the same backend's `pack_*`; no other code reads their
contents. What all layers of a KV cache group have in common in a step is computed once, by `plan_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from tokenmill.arch.indexer import BlockIndexer, Indexer
from tokenmill.arch.spec import Activation, Gqa, MoeSpec, RoutingSpec
from tokenmill.ops.batch import ForwardBatch, LayerCache, Mode
from tokenmill.ops.compressed import WindowedInputs
from tokenmill.ops.low_rank import HeldExperts, LowRankOps
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.recurrent import RecurrentArgs, RecurrentCache, ScanInputs
from tokenmill.ops.streams import AltUpOps, HyperOps

Dense = Callable[[RawTensor], torch.Tensor]
"""Returns the dequantised values of a raw tensor, in the compute dtype on the device."""


@dataclass(frozen=True)
class LinearWeight:
    """A matrix [rows, columns] packed by one backend; only that backend reads `packed`."""

    rows: int
    columns: int
    packed: Any
    bias: torch.Tensor | None = None  # [rows]
    whole_rows: int = 0  # rows of the uncut matrix, on one of several ranks; 0: the matrix is not cut


@dataclass(frozen=True)
class ExpertsWeight:
    """The MLPs of all experts of a layer, packed by one backend."""

    num_experts: int  # including shared experts that were appended
    packed: Any
    is_gated: bool = True
    gate_up_bias: torch.Tensor | None = None  # [experts, 2 * inter], or of up alone if there is no gate
    down_bias: torch.Tensor | None = None  # [experts, H]
    num_shared: int = 0  # shared experts, the last ones: every token uses them with weight 1
    gather_inner: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Where experts are cut by rows over ranks: gathers act(gate) * up"""
    gather_out: Callable[[torch.Tensor], torch.Tensor] | None = None  # likewise for the product with down
    sum_out: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Where down is cut by columns over ranks: sums the results [T, H] over the ranks. The caller of `Ops.experts`
    applies it, once all experts' results are added."""

    @property
    def has_bias(self) -> bool:
        return self.gate_up_bias is not None


class Routing(NamedTuple):
    """How a router selects and weights experts; see `RoutingSpec`."""

    num_active: int
    spec: RoutingSpec = RoutingSpec()
    choice_bias: torch.Tensor | None = None  # float32 [experts]
    expert_scales: torch.Tensor | None = None  # float32 [experts]
    num_shared: int = 0  # appended shared experts, which every token uses with weight 1
    chosen: torch.Tensor | None = (
        None  # int64 [T, k]: experts looked up by token id, for which only weights are computed
    )

    @property
    def is_plain(self) -> bool:
        """True for softmax and top-k, with or without renormalisation."""
        return self.spec in (RoutingSpec(renormalize=True), RoutingSpec(renormalize=False))


@dataclass(frozen=True)
class AttentionArgs:
    """Parameters of one layer's attention."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # float32 [heads]
    is_chunked: bool = False  # chunked attention: the window starts at multiples of its size
    slopes: torch.Tensor | None = None  # float32 [heads], of ALiBi


class Norm(NamedTuple):
    """An RMSNorm, or a LayerNorm if it is centred."""

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
        """True if no exchange with other ranks belongs to the product. Fused regions support only such projections."""
        ...

    @property
    def is_adapted(self) -> bool:
        """True if a loaded adapter changes this projection."""
        ...

    def __call__(self, x: torch.Tensor, mode: Mode, adapters: Any = None) -> torch.Tensor:
        """x [T, columns] → [T, rows], adapters included; `adapters`: see `LowRankOps.plan`."""
        ...

    def gated(self, x: torch.Tensor, activation: Activation, mode: Mode, adapters: Any) -> torch.Tensor:
        """The same for gate rows stacked above up rows, followed by act(gate) * up: → [T, rows / 2]"""
        ...


class XieluCurve(NamedTuple):
    """The numbers of an xIELU: positive x² + linear x above 0, negative (e^min(x, eps) - 1 - x) + linear x below."""

    positive: float
    negative: float
    linear: float
    eps: float


@dataclass(frozen=True)
class GatedMlpWeights:
    """An MLP: down(act(gate(x)) * up(x)) with gate and up stacked, or down(act(up(x))) without a gate."""

    norm: Norm | None
    gate_up: ProjectionWeights
    down: ProjectionWeights
    activation: Activation
    post_norm: Norm | None = None  # of the result, before it is added to the stream
    is_gated: bool = True
    scale: float = 1.0  # of the result, before it is added to the stream
    cutoff: float | None = None  # activation sparsity: gates below mean + cutoff * standard deviation become 0
    curve: XieluCurve | None = None  # of the activation "xielu"


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token uses, weighted by the sigmoid of its own gate or by 1."""

    gate_up: ProjectionWeights
    down: ProjectionWeights
    activation: Activation
    gate: torch.Tensor | None  # float32 [H]
    is_gated: bool = True


@dataclass(frozen=True)
class MoeWeights:
    """A router, its experts, and optionally a shared expert."""

    norm: Norm | None
    router: ProjectionWeights
    experts: ExpertsWeight
    spec: MoeSpec
    shared: SharedExpert | None = None
    post_norm: Norm | None = None
    choice_bias: torch.Tensor | None = None  # float32 [experts]
    expert_scales: torch.Tensor | None = None  # float32 [experts]
    router_norm: Norm | None = None  # the router's own norm of the stream
    latent: tuple[ProjectionWeights, ProjectionWeights] | None = None  # into the experts' latent space, and back
    scale: float = 1.0
    adapters: HeldExperts | None = None  # of the experts; None: no adapter can be loaded
    table: torch.Tensor | None = None  # int64 [vocab, k]: experts by token id, where there is no top-k
    chosen: torch.Tensor | None = None  # int64 [T, k]: `table` looked up for a step's tokens

    @cached_property
    def routing(self) -> Routing:
        shared = self.experts.num_shared
        return Routing(
            self.spec.num_active, self.spec.routing, self.choice_bias, self.expert_scales, shared, self.chosen
        )


@dataclass(frozen=True)
class SideBySideWeights:
    """An MLP and experts that read the same stream; each result is normed, and their sum is normed again."""

    mlp: GatedMlpWeights
    experts: MoeWeights
    post_norm: Norm | None
    scale: float = 1.0


FeedWeights = GatedMlpWeights | MoeWeights | SideBySideWeights


@dataclass(frozen=True)
class InputWeights:
    """Per-layer embeddings: up(act(gate(x)) * input), normed, is added, where `input` is the layer's embedding."""

    gate: ProjectionWeights
    up: ProjectionWeights
    norm: Norm
    activation: Activation


@dataclass(frozen=True)
class LayerWeights:
    """All weights of a layer except the mixer's own, in the order of their use."""

    norm: Norm | None
    project_in: ProjectionWeights  # the mixer's inputs: queries, keys and values as one matrix
    project_out: ProjectionWeights
    post_norm: Norm | None
    feed: FeedWeights | None  # None: the layer has neither MLP nor experts
    scale: float = 1.0  # of the mixer's result, before it is added to the stream
    is_parallel: bool = False  # MLP and mixer read the same stream
    add_input: InputWeights | None = None
    stream_scale: torch.Tensor | None = None  # [1]: multiplies the stream at the end of the layer
    side_out: ProjectionWeights | None = None  # of a second mixer
    has_streams: bool = False  # several residual streams: `Regions.added` is called, and inputs are not overwritten


class BatchClass(NamedTuple):
    """Batches that are computed by the same regions, which are chosen when the model is loaded."""

    min_rows: int
    max_rows: int
    mode: Mode
    gathers: bool  # of the last layer, which continues with `logit_rows` only


class AttendInputs(NamedTuple):
    """The inputs of one layer's attention."""

    qkv: torch.Tensor  # [T, (heads + 2 kv_heads) * D]; queries only, if the layer shares another's cache
    cache: LayerCache
    slots: torch.Tensor  # int64 [T], where the tokens' keys and values are written
    norms: tuple[torch.Tensor, torch.Tensor] | None  # of queries and keys, [D] each
    eps: float
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None  # [T, rotary / 2] each
    plan: Any  # of this backend, see `plan_attention`
    args: AttentionArgs
    spec: Gqa | None = None  # set if the layer has further options (not `Gqa.is_plain`)
    growth: torch.Tensor | None = None  # float32 [T], factors of the queries


class LatentInputs(NamedTuple):
    """The inputs of one layer's latent attention; `rank` is the width of a token's latent vector."""

    queries: torch.Tensor  # [T, heads * (nope + rope)]
    entries: torch.Tensor  # [T, rank + rope]: a latent, not yet normed, and a key, not yet rotated
    latents: torch.Tensor  # the cache, [blocks, block_size, rank + rope]
    slots: torch.Tensor  # int64 [T], where the tokens' entries are written
    norm: Norm  # of latents, [rank]
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None  # [T, rope / 2] each
    absorb: torch.Tensor  # [heads, rank, nope]: maps the unrotated part of a query to the latent space
    expand: torch.Tensor  # [heads, value_dim, rank]: maps a weighted sum of latents to a head's value
    plan: Any  # of this backend, see `plan_attention`
    scale: float
    choice: Any = None  # the entries to attend to, from `choose_entries`; None: all


class IndexInputs(NamedTuple):
    """The inputs of an indexer (`arch/indexer.py`), which chooses entries for sparse latent attention."""

    queries: torch.Tensor  # [T, index heads * dim]
    keys: torch.Tensor  # [T, dim], neither normed nor rotated yet
    weights: torch.Tensor  # [T, index heads]
    kept: torch.Tensor  # the cache of keys, [blocks, block_size, dim]
    slots: torch.Tensor  # int64 [T], where the tokens' keys are written
    norm: Norm  # of keys, a LayerNorm
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None  # [T, rope / 2] each
    plan: Any  # of this backend, for the keys' cache group
    indexer: Indexer


class BlockIndexInputs(NamedTuple):
    """The inputs of an indexer of blocks (`arch/indexer.py`), which chooses what grouped-query attention reads."""

    queries: torch.Tensor  # [T, index heads * dim], neither normed nor rotated yet
    keys: torch.Tensor  # [T, dim], likewise
    kept: torch.Tensor  # the cache of keys, [blocks, block_size, dim]
    slots: torch.Tensor  # int64 [T], where the tokens' keys are written
    norms: tuple[torch.Tensor, torch.Tensor]  # of queries and keys, [dim] each
    eps: float
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None  # [T, rope / 2] each
    plan: Any  # of this backend, for the keys' cache group
    indexer: BlockIndexer


Stream = Any
"""The residual stream between two regions; its form is private to the regions of one backend."""


class ProjectAndAdd(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        projection: ProjectionWeights,
        stream: Stream,
        post_norm: Norm | None,
        scale: float = 1.0,
    ) -> Stream:
        """Add scale * post_norm(projection(x)) to the stream; x [T, columns], `post_norm` is optional."""
        ...


@dataclass(frozen=True)
class Regions:
    """The functions that compute one layer for the batches of one class. A region may overwrite its input stream."""

    begin: Callable[[torch.Tensor], Stream]
    """Make a stream from a tensor [T, H]"""
    norm_project: Callable[[Stream, Norm | None, ProjectionWeights], tuple[torch.Tensor, Stream]]
    """→ projection(norm(stream)) [T, rows], and the stream; the norm is optional"""
    project: Callable[[torch.Tensor, ProjectionWeights], torch.Tensor]
    """x [T, columns] → projection(x) [T, rows], independent of the stream"""
    attend: Callable[[AttendInputs], torch.Tensor]
    """Norm and rotate queries and keys, write keys and values to the cache, attend over the context → [T, heads * D].
    Mixers of other kinds have their own ops."""
    gather: Callable[[Stream, torch.Tensor], Stream]
    """(stream of T rows, indices [L]) → the stream of those rows"""
    project_add: ProjectAndAdd
    gated_mlp: Callable[[Stream, GatedMlpWeights], Stream]
    """Add the MLP of the normed stream to it"""
    experts: Callable[[Stream, MoeWeights], Stream]
    """Add the routed experts of the normed stream to it"""
    side_by_side: Callable[[Stream, SideBySideWeights], Stream]
    """Add an MLP and experts of the same stream to it"""
    project_and_feed: Callable[[torch.Tensor, ProjectionWeights, Stream, FeedWeights, float], Stream]
    """Add projection(x) and the MLP or experts of the normed stream to it: a layer with parallel mixer and MLP"""
    add_input: Callable[[Stream, torch.Tensor, InputWeights], Stream]
    """Add the gated per-layer embeddings [T, width] to the stream"""
    gated_input: Callable[[torch.Tensor, torch.Tensor, InputWeights], torch.Tensor]
    """(x [T, H], embeddings [T, width]) → the gated per-layer embeddings [T, H], not added"""
    whole: Callable[[Stream], torch.Tensor]
    """→ the stream as a tensor [T, H]"""
    added: Callable[[Stream], torch.Tensor]
    """→ what the last region added to its input stream [T, H]"""
    scale: Callable[[Stream, torch.Tensor], Stream]
    """Multiply the stream by a factor [1]"""
    finish: Callable[[Stream, Norm], torch.Tensor]
    """→ norm(stream) [T, H]"""


class ChooseRegions(Protocol):
    def __call__(self, ops: Ops, layers: Sequence[LayerWeights], batch: BatchClass) -> list[Regions]:
        """Return the regions of each layer. Called at load, once for every batch class."""
        ...


def no_row_borders(_device: torch.device) -> tuple[int, ...]:
    """Return no borders: the regions are the same for any number of rows."""
    return ()


class Linear(Protocol):
    def __call__(self, x: torch.Tensor, weight: LinearWeight, mode: Mode = "eager") -> torch.Tensor:
        """x [T, columns] → [T, rows]; `mode` may select another kernel for the same product."""
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
        float32. Each token's b * x is written to the cache `inputs` [blocks, block_size, width] for later steps."""
        ...


class PlanAttention(Protocol):
    def __call__(self, batch: ForwardBatch, group: int, window: int | None, *, is_chunked: bool = False) -> Any:
        """Prepare what `attention` of all layers of a cache group reads; called once per step."""
        ...


class Recur(Protocol):
    def __call__(self, projected: torch.Tensor, cache: RecurrentCache, plan: Any, args: RecurrentArgs) -> torch.Tensor:
        """projected [T, q k v z (b) a] → normed and gated outputs [T, values]; writes the tokens' cells and states into
        `cache` where the block tables have a block for them."""
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
        """Pack gate (or None) and up [experts, inter, H], down [experts, H, inter]. `shared`: gate, up and down of a
        shared expert whose width is a multiple of inter; a backend may append it as experts (`num_shared`), and
        otherwise ignores it: the caller then computes it."""
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
    """Pack matrices with the same input, stacked by rows in this order; bias [all rows] or None."""
    pack_embedding: Callable[[RawTensor, Dense], LinearWeight]
    """Pack a matrix whose rows `embed` looks up; models with tied weights also multiply by it."""
    pack_experts: PackExperts
    # ── once per step and KV group ──
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
    """(x [..., N], weight [N], bias [N] or None, eps): RMSNorm of x minus its mean, plus the bias"""
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    """(x, residual, weight, eps) → (rms_norm(x + residual), x + residual)"""
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(x [T, heads, D], cos, sin [T, rotary / 2] float32): rotate pairs (x[i], x[i + rotary / 2]), keep the rest"""
    write_kv: Callable[[LayerCache, torch.Tensor, torch.Tensor, torch.Tensor], None]
    """(cache, keys, values [T, kv_heads, D], slots [T]): write to the cache"""
    attention: Callable[[torch.Tensor, LayerCache, Any, AttentionArgs], torch.Tensor]
    """queries [T, heads, D] over the paged context → [T, heads * D]"""
    latent_attend: Callable[[LatentInputs], torch.Tensor]
    """Norm, rotate and write the tokens' entries to the cache; attend over the context's entries with all heads →
    [T, heads * value_dim]"""
    choose_entries: Callable[[IndexInputs], Any]
    """Norm, rotate and write the index keys to the cache → the entries to which `latent_attend` of this layer, and of
    layers that share its index, attends"""
    choose_blocks: Callable[[BlockIndexInputs, Any], Any]
    """Norm, rotate and write the index keys to the cache; (inputs, plan of attention) → the plan with the blocks to
    which `attention` attends"""
    windowed_attend: Callable[[WindowedInputs], torch.Tensor]
    """Norm, rotate and write the keys to the cache, and compress completed groups of tokens to entries; attend over the
    window and earlier entries → [T, heads * head_dim]"""
    multiply_groups: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(x [T, groups, columns], matrices [groups, rows, columns]) → [T, groups * rows]"""
    plan_short_conv: Callable[[ForwardBatch, int, int], Any]
    """(batch, group, kernel) → what `short_conv` of this group's layers reads; once per step"""
    short_conv: ShortConvolve
    plan_recurrent: Callable[[ForwardBatch, int, int], Any]
    """(batch, group of cells, group of states) → what `recurrent` reads; once per step"""
    recurrent: Recur
    convolve_values: Recur
    """Of Mamba-1: projected [T, v z] → silu of v's convolution [T, values]; nothing is cached"""
    scan: Callable[[ScanInputs, RecurrentCache, Any, RecurrentArgs], torch.Tensor]
    """Mamba-1's recurrence → gated outputs [T, values]; writes the tokens' cells and states"""
    act_mul: Callable[[torch.Tensor, Activation], torch.Tensor]
    """[T, 2 * inter], gate then up → act(gate) * up"""
    cut_act_mul: Callable[[torch.Tensor, Activation, float], torch.Tensor]
    """`act_mul` of relu(gate - (mean + cutoff * standard deviation)), both over a token's gates"""
    activate: Callable[[torch.Tensor, Activation], torch.Tensor]
    """act(x), for MLPs without a gate"""
    gate_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(y [T, H], x [T, H], gate float32 [H]) → each row of y times sigmoid(x·gate) of the same row"""
    route: Callable[[torch.Tensor, Routing], tuple[torch.Tensor, torch.Tensor]]
    """(router logits [T, experts], routing) → float32 weights [T, k], int64 expert ids [T, k], shared experts last"""
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertsWeight, Activation], torch.Tensor]
    """(x [T, H], weights, ids, packed, activation) → weighted sum of the chosen experts [T, H]"""
    softcap: Callable[[torch.Tensor, float], torch.Tensor]
    """cap * tanh(x / cap)"""
    altup: AltUpOps
    hyper: HyperOps
    # ── layers, once at load ──
    choose_regions: ChooseRegions
    adapted_regions: Callable[[Ops, Mode, Any], Regions]
    """(ops, mode, `LowRankOps.plan`) → the regions of all layers for a batch in which some tokens use adapters"""
    low_rank: LowRankOps
    row_borders: Callable[[torch.device], tuple[int, ...]] = no_row_borders
    """The row counts at which the choice of regions may change on a device, ascending"""
    # ── optional ──
    joins_shared: bool = False  # `pack_experts` appends a shared expert to the routed ones where it can
    argmax: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    """Logits of any dtype [L, vocab] → see `BestLogits` (`models/protocol.py`)"""
