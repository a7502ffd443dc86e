"""Tensor parallelism: how a model's matrices are cut over ranks, derived from its spec as data. No torch.

By default every matrix is cut by its rows, that is by its outputs: a rank has some rows of each matrix and computes
those outputs, and the input of the next product is gathered from all ranks. No sum crosses ranks, so results have the
same bits for any number of ranks. Blocks of quantised weights lie along the columns and stay whole. A matrix can be cut
at any row, so any number of heads can be split over any number of ranks.

    matrix                       cut                           gathered from all ranks
    q, k, v, attn_gate, sinks    by heads                      nothing: a rank attends with its own heads
    o                            rows                          its input (heads) and its output
    gate, up (experts' too)      rows                          nothing: each rank applies the activation to its rows
    down (experts' too)          rows                          its input (inner activations) and its output
    gate, up with sparsity,
    or of xIELU                  rows                          their output
    embed, head                  rows of the vocabulary        looked-up rows; logits
    other projections            rows                          their output

With sums enabled, `o` (if heads are cut) and `down` are cut by columns instead: each rank multiplies the inputs that it
computed itself, and the products are summed over the ranks (all-reduce). That halves the number of exchanges, but the
order of the additions depends on the number of ranks. Matrices quantised in blocks are still cut by rows.

    o                            columns, by heads             nothing; its output is summed
    down (experts' too)          columns                       nothing; its output is summed, over experts first

Keys and values are cut with the heads if all layers of the model cache the same fields per token. Otherwise, and for
mixers of other kinds, each rank computes the whole mixer from gathered projections. Norms and routers are not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.regions import Experts, Feed, GatedMlp, Matrices, SideBySide, layer_regions
from tokenmill.arch.spec import Gqa, LayerSpec, Mla, ModelSpec
from tokenmill.arch.tensors import tensors_of
from tokenmill.parallel.experts import Owners, place_experts

PANEL = 16  # rows that native kernels compute together; they take two panels at a time
Span = tuple[int, int]
HasSum = Callable[[str], bool]
"""Whether products with a matrix of this name may be sums over ranks."""


@dataclass(frozen=True)
class Cut:
    """The rows [start, stop) that each rank has of a matrix, or its elements of an activation."""

    spans: tuple[Span, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.spans)

    @property
    def borders(self) -> list[int]:
        """Return the first row of each rank and the end of the last rank's; only for cuts without overlap."""
        return [self.spans[0][0], *(stop for _, stop in self.spans)]


@dataclass(frozen=True)
class MatrixCut:
    """How one matrix is cut over the ranks."""

    rows: Cut
    gathered: Literal["product", "activation", "attention", "sum"] = "product"
    """What is exchanged: the product itself, the activation or the attention output computed from it, or nothing but a
    sum of the ranks' partial products."""
    inputs: Cut | None = None
    """The part of the input that each rank has, to be gathered; None: each rank has all of the input that it needs."""
    columns: Cut | None = None
    """The columns that each rank has, where products are summed; None: all columns."""

    @classmethod
    def summed(cls, num_rows: int, columns: Cut) -> MatrixCut:
        return cls(Cut(((0, num_rows),) * len(columns.spans)), "sum", columns=columns)


@dataclass(frozen=True)
class Cuts:
    """One rank's part of a model. Matrices are named without their suffix; those not listed are not cut."""

    rank: int
    size: int
    matrices: Mapping[str, MatrixCut]
    experts: Mapping[str, Owners] = field(default_factory=dict)  # by matrix, with expert parallelism

    def find(self, name: str) -> MatrixCut | None:
        return self.matrices.get(name)

    def rows(self, tensor: str) -> Span | None:
        """Return the rows of a tensor (`….weight`, `….bias`, or a vector) that this rank has; None: all rows."""
        cut = self.matrices.get(tensor.removesuffix(".weight").removesuffix(".bias"))
        return None if cut is None else cut.rows.spans[self.rank]

    def columns(self, tensor: str) -> Span | None:
        """Return the columns of a tensor that this rank has; None: all columns."""
        cut = self.matrices.get(tensor.removesuffix(".weight"))
        return None if cut is None or cut.columns is None else cut.columns.spans[self.rank]

    def has_bias(self, tensor: str) -> bool:
        """Return whether this rank adds a bias (`….bias`); where products are summed over ranks, only rank 0 does."""
        cut = self.matrices.get(tensor.removesuffix(".bias"))
        return cut is None or cut.gathered != "sum" or self.rank == 0

    def own_experts(self, tensor: str) -> list[int] | None:
        """Return the experts of a tensor [experts, ...] that this rank has; None: all, or the tensor has no experts."""
        owners = self.experts.get(tensor.removesuffix(".weight").removesuffix(".bias"))
        return None if owners is None else [expert for expert, ranks in enumerate(owners) if self.rank in ranks]

    @cached_property
    def recipe(self) -> str:
        """Return a string that identifies this rank's rows, columns and experts, for cache keys."""
        rows = sorted((name, cut.rows.spans[self.rank], self.columns(name)) for name, cut in self.matrices.items())
        return repr(rows) + (repr(sorted(self.experts.items())) if self.experts else "")


def split_evenly(total: int, size: int, unit: int = 1) -> Cut:
    """Cut the range [0, total) at multiples of `unit`; if the parts are uneven, the first ones are larger."""
    units = -(-total // unit)
    borders = [min(total, unit * (rank * (units // size) + min(rank, units % size))) for rank in range(size + 1)]
    return Cut(tuple(pairwise(borders)))


def split_rows(total: int, size: int) -> Cut:
    """Cut the rows of a matrix at panel borders, or between them if there are too few panels for all ranks."""
    unit = 2 * PANEL if total >= 32 * PANEL * size else PANEL
    while unit > 1 and total < unit * size:
        unit //= 2
    return split_evenly(total, size, unit)


# ── heads ──────────────────────────────────────────────────────────────────────────────────────────────


def split_heads(num_heads: int, num_kv_heads: int, size: int) -> tuple[Cut, Cut] | None:
    """Return the query heads and the KV heads of each rank; None if a rank would get none.

    A rank gets KV heads with all their query heads. If there are more ranks than KV heads, several ranks hold a copy of
    the same KV head and divide its query heads.
    """
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        keys = split_evenly(num_kv_heads, size)
        return Cut(tuple((start * group, stop * group) for start, stop in keys.spans)), keys
    owners = [rank * num_kv_heads // size for rank in range(size)]
    spans: list[Span] = []
    for rank, owner in enumerate(owners):
        sharers = owners.count(owner)
        if sharers > group:
            return None
        start, stop = split_evenly(group, sharers).spans[rank - owners.index(owner)]
        spans.append((owner * group + start, owner * group + stop))
    return Cut(tuple(spans)), Cut(tuple((owner, owner + 1) for owner in owners))


def cuts_heads(spec: ModelSpec, size: int) -> bool:
    """Return whether attention heads are cut over the ranks.

    All ranks share the block tables, so all layers must cache the same fields. A QK norm over all heads needs them all,
    and so does an indexer of blocks.
    """
    mixers = [layer.mixer for layer in spec.layers]
    kept = {mixer.cache_fields() for mixer in mixers if isinstance(mixer, Gqa) and mixer.has_own_kv}
    return (
        len(kept) == 1
        and all(isinstance(mixer, Gqa | Recurrent) for mixer in mixers)
        and all(
            mixer.qk_norm != "all"
            and mixer.block_indexer is None
            and split_heads(mixer.num_heads, mixer.num_kv_heads, size) is not None
            for mixer in spec.attentions
        )
    )


def _head_cuts(mixer: Gqa, name: str, size: int) -> Iterator[tuple[str, MatrixCut]]:
    found = split_heads(mixer.num_heads, mixer.num_kv_heads, size)
    assert found is not None, "see `cuts_heads`"
    queries, keys = found
    values = mixer.value_dim or mixer.head_dim
    sizes = {"q": (queries, mixer.head_dim), "sinks": (queries, 1)}
    if mixer.has_own_kv:
        sizes |= {"k": (keys, mixer.head_dim), "v": (keys, values)}
    if mixer.gate is not None:
        sizes["attn_gate"] = (queries, 1 if mixer.gate.is_per_head else values)
    for part, (heads, width) in sizes.items():
        yield f"{name}.{part}", MatrixCut(_times(heads, width), "attention")


def _times(cut: Cut, width: int) -> Cut:
    return Cut(tuple((start * width, stop * width) for start, stop in cut.spans))


# ── the whole model ────────────────────────────────────────────────────────────────────────────────────


def cut_model(
    spec: ModelSpec, size: int, *, by_heads: bool = True, sums: bool = False, in_blocks: Container[str] = ()
) -> dict[str, MatrixCut]:
    """Return the cuts of a model's matrices for `size` ranks, by name.

    `by_heads`: False for data-parallel attention, where each rank attends with all heads for some of the sequences.
    `sums`: cut by columns and sum the products where possible; not for matrices `in_blocks`, that is block-quantised
    along the columns.
    """
    rows = {
        name.removesuffix(".weight"): tensor.shape[-2]
        for name, tensor in tensors_of(spec).items()
        if tensor.kind != "vector"
    }

    def has_sum(name: str) -> bool:
        return sums and name not in in_blocks

    found = dict(_matrices(spec, size, rows, has_sum, by_heads=by_heads and cuts_heads(spec, size)))
    return {name: cut for name, cut in found.items() if min(cut.rows.widths) > 0}  # smaller matrices are not cut


def _matrices(
    spec: ModelSpec, size: int, rows: Mapping[str, int], has_sum: HasSum, *, by_heads: bool
) -> Iterator[tuple[str, MatrixCut]]:
    ends = ("embed", "head", "layer_inputs.embed", "layer_inputs.project")
    yield from ((name, MatrixCut(split_rows(rows[name], size))) for name in ends if name in rows)
    for number, layer in enumerate(spec.layers):
        yield from _layer(layer, number, size, rows, has_sum, by_heads=by_heads)


def _layer(
    layer: LayerSpec, number: int, size: int, rows: Mapping[str, int], has_sum: HasSum, *, by_heads: bool
) -> Iterator[tuple[str, MatrixCut]]:
    def gathered(matrices: Matrices, inputs: Cut | None = None) -> Iterator[tuple[str, MatrixCut]]:
        for name in matrices.names:
            yield name, MatrixCut(split_rows(rows[name], size), inputs=inputs)

    regions = layer_regions(layer, number)
    heads, mixer = None, layer.mixer
    yield from gathered(regions.project.projection)
    if by_heads and isinstance(mixer, Gqa):
        yield from _head_cuts(mixer, regions.attend.name, size)  # replaces the cuts by rows above
        queries = split_heads(mixer.num_heads, mixer.num_kv_heads, size)
        heads = None if queries is None else _times(queries[0], mixer.value_dim or mixer.head_dim)
    if heads is not None and all(map(has_sum, regions.add.projection.names)):
        yield from ((name, MatrixCut.summed(rows[name], heads)) for name in regions.add.projection.names)
    else:
        yield from gathered(regions.add.projection, heads)
    if regions.side is not None:
        yield from gathered(regions.side[1].projection)
    if regions.add_input is not None:
        yield from gathered(regions.add_input.gate)
        yield from gathered(regions.add_input.up)
    if regions.feed is not None:
        yield from _feed(regions.feed, size, rows, has_sum)


def _feed(feed: Feed, size: int, rows: Mapping[str, int], has_sum: HasSum) -> Iterator[tuple[str, MatrixCut]]:
    match feed:
        case GatedMlp() if feed.spec.sparsity or feed.curve:  # computed from whole rows of products
            for name in (*feed.gate_up.names, *feed.down.names):
                yield name, MatrixCut(split_rows(rows[name], size))
        case GatedMlp():
            yield from _mlp(feed.gate_up.names, feed.down.names, size, rows, has_sum)
        case Experts():
            names = (feed.ups,) if feed.gates is None else (feed.gates, feed.ups)
            yield from _mlp(names, (feed.downs,), size, rows, has_sum)
            if feed.shared is not None:
                gate_up, down = feed.shared
                yield from _mlp(gate_up.names, down.names, size, rows, has_sum)
            for matrices in feed.latent or ():
                yield from ((name, MatrixCut(split_rows(rows[name], size))) for name in matrices.names)
        case SideBySide():
            yield from _feed(feed.mlp, size, rows, has_sum)
            yield from _feed(feed.experts, size, rows, has_sum)


def _mlp(
    ups: tuple[str, ...], downs: tuple[str, ...], size: int, rows: Mapping[str, int], has_sum: HasSum
) -> Iterator[tuple[str, MatrixCut]]:
    inner = split_rows(rows[ups[0]], size)
    yield from ((name, MatrixCut(inner, "activation")) for name in ups)
    inputs = inner if min(inner.widths) > 0 else None
    if inputs is not None and all(map(has_sum, downs)):
        yield from ((name, MatrixCut.summed(rows[name], inner)) for name in downs)
        return
    yield from ((name, MatrixCut(split_rows(rows[name], size), inputs=inputs)) for name in downs)


def spread_experts(
    spec: ModelSpec, size: int, loads: Mapping[str, Sequence[float]], copies: int = 0
) -> dict[str, Owners]:
    """Return the ranks that own each expert, by name of the experts' matrix, for expert parallelism.

    `loads`: measured tokens per expert, by name of the layer's router; layers without an entry are split in order.
    """
    found: dict[str, Owners] = {}
    for number, layer in enumerate(spec.layers):
        feed = layer_regions(layer, number).feed
        experts = feed.experts if isinstance(feed, SideBySide) else feed
        if not isinstance(experts, Experts):
            continue
        (router,) = experts.router.names
        owners = place_experts(experts.spec.num_experts, size, loads.get(router), copies)
        names = (experts.gates, experts.ups, experts.downs)
        found |= {name: owners for name in names if name is not None}
    return found


def shard_model(
    spec: ModelSpec, size: int, rank: int, *, ep: bool = False, loads: Mapping[str, Sequence[float]] | None = None,
    copies: int = 0, by_heads: bool = True, sums: bool = False, in_blocks: Container[str] = (),
) -> Cuts:  # fmt: skip
    """Return one rank's part of a model. `ep`: expert parallelism, that is whole experts instead of rows of each;
    `by_heads`, `sums`, `in_blocks`: as in `cut_model`."""
    if size == 1:
        return Cuts(rank, size, {})
    experts = spread_experts(spec, size, loads or {}, copies) if ep else {}
    cuts = cut_model(spec, size, by_heads=by_heads, sums=sums, in_blocks=in_blocks)
    matrices = {name: cut for name, cut in cuts.items() if name not in experts}
    return Cuts(rank, size, matrices, experts)


def cut_spec(spec: ModelSpec, size: int, rank: int, *, by_heads: bool = True) -> ModelSpec:
    """Return the spec of one rank's model: with fewer heads if heads are cut, and otherwise unchanged."""
    if not by_heads or not cuts_heads(spec, size):
        return spec
    return replace(spec, layers=tuple(_own_heads(layer, size, rank) for layer in spec.layers))


def parting_limits(spec: ModelSpec) -> str | None:
    """Return why data-parallel attention is not possible for this model; None if it is."""
    if not all(isinstance(mixer, Gqa | Mla) for layer in spec.layers for mixer in layer.mixers):
        return "some layers of this model cache other state than blocks of tokens"
    if any(isinstance(mixer, Mla) and mixer.is_sparse for layer in spec.layers for mixer in layer.mixers):
        return "the model uses sparse attention with an indexer"
    if any(mixer.block_indexer is not None for mixer in spec.attentions):
        return "the model attends to blocks that an indexer selects"
    return None


def _own_heads(layer: LayerSpec, size: int, rank: int) -> LayerSpec:
    mixer = layer.mixer
    if not isinstance(mixer, Gqa):
        return layer
    found = split_heads(mixer.num_heads, mixer.num_kv_heads, size)
    assert found is not None, "see `cuts_heads`"
    queries, keys = (cut.widths[rank] for cut in found)
    slopes = mixer.slopes[slice(*found[0].spans[rank])]
    return replace(layer, mixer=replace(mixer, num_heads=queries, num_kv_heads=keys, slopes=slopes))
