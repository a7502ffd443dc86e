"""Cache groups: how a model's layers share one pool of blocks. Pure data, no torch.

A layer's mixer defines the fields that it stores per token (`cache_parts`). Layers with the same fields and the same
window need the same blocks at the same time: they form cache groups, and a sequence has one block table per group. The
groups' sizes are chosen so that a block has about the same number of bytes in every group; then one pool of equal
blocks serves all groups, and a block released by one group can be used by another:

    18 layers of attention, every sixth one global    block 7, owned by group 0         block 9, owned by group 1
    group 0  (window None)  layers 5 11 17            ┌ layer 5 ┬ layer 11 ┬ layer 17 ┐ ┌ layer 0 ┬ layer 1 ┬ layer 2 ┐
    group 1  (window 512)   layers 0 1 2              │  K , V  │  K , V   │  K , V   │ │  K , V  │  K , V  │  K , V  │
    ...                                               └─────────┴──────────┴──────────┘ └─────────┴─────────┴─────────┘

    6 layers of attention, 10 short convolutions      block 7, owned by group 0         block 9, owned by group 1
    group 0  (window None)  layers 2 5 8 10 12 14     ┌ K V ┬ K V ┬ K V ┬ K V ┬ K V ┬ K V ┐ ┌ inputs ┬ inputs ┬ inputs ┐
    group 1  (window 3)     layers 0 1 3              └─────┴─────┴─────┴─────┴─────┴─────┘ └────────┴────────┴────────┘
    ...

A group with a window releases the blocks before it. A short convolution is such a group with a window of a few tokens:
since every token's input stays in a block of its sequence until the window has passed, prefix hits, forks, preemption
and rejected draft tokens work as for keys and values.

A recurrent mixer (gated DeltaNet, Mamba-2) has two groups of other kinds, `cells` and `state` (`arch/cache_parts.py`),
whose blocks have other sizes and are in separate pools: all recurrent layers of a model are one group of each kind. The
kind of a group determines which entries of its block tables it needs (`EntryRule`). A model without other layers still
has a group of blocks, with a window of one token (`UNREAD`).

    kind     an entry holds                       a query at position p needs entries from
    paged    the tokens of a block                0, or that of token p - window + 1
    cells    the tokens of a block                that of token p // 64 * 64, where p's chunk starts
    state    the state after 64 more tokens       p // 64 - 1, the one before p's chunk

Block ids of all kinds share one number space with a region for each kind; 0 is the null block of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import ceil, lcm, prod

from tokenmill.arch.cache_parts import CHUNK, CacheField, CacheKind, CachePart
from tokenmill.arch.cost import KV_SCALE_BYTES, bytes_per_value
from tokenmill.arch.spec import MixerSpec, ModelSpec, ShortConv, WindowedMqa
from tokenmill.config.engine import USUAL_BLOCK_SIZE
from tokenmill.errors import InvalidConfig, UnsupportedModel

UNREAD_FIELD = "unread"
UNREAD = CachePart("paged", (CacheField(UNREAD_FIELD, (1,), "float32"),), window=1)
"""What a model of recurrent layers alone keeps in its blocks, so that it has some: a number per token, never read"""
REGIONS: tuple[CacheKind, ...] = ("paged", "cells", "state")
MAX_PADDING = 0.1  # largest unused share of a block; otherwise smaller groups are used
SHORT_WINDOW = 16  # tokens: a group with a shorter window holds at most two blocks of a sequence of any length


@dataclass(frozen=True)
class CacheDtypes:
    """The data types of fields: keys and values ("cache"), and fields that are not rounded ("compute")."""

    cache: str = "float32"
    compute: str = "float32"

    def resolved(self, field: CacheField) -> CacheField:
        return replace(field, dtype={"cache": self.cache, "compute": self.compute}.get(field.dtype, field.dtype))


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a block table and have the same fields; `window`: how many tokens a query sees (None: all)."""

    fields: tuple[CacheField, ...]
    window: int | None
    layers: tuple[int, ...]
    kind: CacheKind = "paged"

    def keeps(self, name: str) -> bool:
        return any(field.name == name for field in self.fields)


@dataclass(frozen=True)
class KVLayout:
    groups: tuple[CacheGroup, ...]
    block_multiple: int = 1  # the block size must be a multiple of this: the tokens of a compressed entry

    @classmethod
    def from_spec(cls, spec: ModelSpec, dtypes: CacheDtypes | None = None) -> KVLayout:
        """Return the layout of a model. If all fields have the cache's type (attention), `dtypes` change only the
        number of bytes."""
        kinds = _layers_by_kind(spec, dtypes or CacheDtypes())
        paged = {part: layers for part, layers in kinds.items() if part.kind == "paged"}
        if not paged:
            kinds = {UNREAD: [0], **kinds}
            paged = {UNREAD: [0]}
        size = _block_bytes_per_token(paged)
        groups: list[CacheGroup] = []
        for part, layers in paged.items():
            count = size // _layer_bytes(part.fields)
            groups += [
                CacheGroup(part.fields, part.window, tuple(layers[start : start + count]))
                for start in range(0, len(layers), count)
            ]
        recurrent = {part: layers for part, layers in kinds.items() if part.kind != "paged"}
        if len(recurrent) > 2:
            raise UnsupportedModel("recurrent layers of different shapes in one model are not implemented")
        groups += [CacheGroup(part.fields, None, tuple(layers), part.kind) for part, layers in recurrent.items()]
        mixers = (layer.mixer for layer in spec.layers if isinstance(layer.mixer, WindowedMqa))
        return cls(tuple(groups), lcm(*(mixer.compression.rate for mixer in mixers if mixer.compression)))

    def of_layers(self, layers: range) -> KVLayout:
        """Return the layout of a pipeline stage with these layers, with the same block ids. If groups have different
        fields, which share memory, the layout is the whole model's: a block has as many rows on every stage."""
        if not self.is_uniform:
            return self
        groups = (replace(group, layers=tuple(one for one in group.layers if one in layers)) for group in self.groups)
        return replace(self, groups=tuple(groups))

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self.groups)

    @cached_property
    def paged(self) -> tuple[CacheGroup, ...]:
        """The groups that share the pool of blocks."""
        return tuple(group for group in self.groups if group.kind == "paged")

    def of_kind(self, kind: CacheKind) -> CacheGroup | None:
        """Return the group of cells or of states, which all recurrent layers share; None if there is none."""
        return next((group for group in self.groups if group.kind == kind), None)

    @property
    def is_recurrent(self) -> bool:
        return len(self.paged) < len(self.groups)

    @property
    def default_block_size(self) -> int:
        """The usual number of tokens per block, or the least multiple of it that fits the model."""
        return lcm(USUAL_BLOCK_SIZE, self.block_multiple)

    def rules(self, block_size: int) -> tuple[EntryRule, ...]:
        """Return one rule per group; refuse a block size that does not fit the model."""
        if block_size % self.block_multiple:
            raise InvalidConfig(
                f"block_size must be a multiple of {self.block_multiple} for this model, which compresses as many "
                f"tokens to one entry, got {block_size}",
                param="block_size",
            )
        return tuple(EntryRule(group.kind, group.window, block_size) for group in self.groups)

    @property
    def num_layers(self) -> int:
        return len({layer for group in self.groups for layer in group.layers})

    @cached_property
    def layers_per_group(self) -> int:
        return max(len(group.layers) for group in self.paged)

    @cached_property
    def is_uniform(self) -> bool:
        """True if all paged groups have the same fields: then every field is a separate tensor."""
        return len({group.fields for group in self.paged}) == 1

    @cached_property
    def rows_per_block(self) -> tuple[int, ...]:
        """How many rows of its tensors a block spans, per group; block ids are multiplied by it for kernels. It is 1 if
        every field is a separate tensor; otherwise fields of several sizes share memory (see `KVStorage`): a row is a
        field of a layer, or all fields of a layer if their sizes differ."""
        if self.is_uniform:
            return (1,) * len(self.groups)
        rows = (self.shared_bytes // _unit_bytes(group.fields) for group in self.paged)
        return (*rows, *(1 for _ in self.groups[len(self.paged) :]))

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes per token of a block that groups with different fields share, without scales."""
        units = lcm(*(_unit_bytes(group.fields) for group in self.paged))
        return ceil(max(len(group.layers) * _layer_bytes(group.fields) for group in self.paged) / units) * units

    @cached_property
    def scaled_kinds(self) -> tuple[tuple[CacheField, ...], ...]:
        """The distinct sets of fields that have scales."""
        kinds = dict.fromkeys(group.fields for group in self.paged)
        return tuple(fields for fields in kinds if has_scale(fields[0]))

    def place(self, layer: int) -> tuple[int, int]:
        """Return (group, index within the group) of a layer's paged fields."""
        for number, group in enumerate(self.paged):  # the first of two groups, if the keys of an index have their own
            if layer in group.layers:
                return number, group.layers.index(layer)
        raise IndexError(f"layer {layer} is not in the layout")

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block of `block_size` tokens, including the scales of 8-bit values."""
        if self.is_uniform:
            return block_size * self.layers_per_group * sum(map(field_bytes, self.groups[0].fields))
        scales = (
            self.shared_bytes // _unit_bytes(kind) * fields_per_row(kind) * scale_bytes(kind[0])
            for kind in self.scaled_kinds
        )
        return block_size * (self.shared_bytes + sum(scales))

    def cells_bytes(self, block_size: int) -> int:
        """Return the bytes of one block of cells."""
        return block_size * self._bytes_of("cells")

    @property
    def state_bytes(self) -> int:
        """The bytes of one slot: the states of all recurrent layers at one position of a sequence."""
        return self._bytes_of("state")

    def _bytes_of(self, kind: CacheKind) -> int:
        group = self.of_kind(kind)
        return 0 if group is None else len(group.layers) * sum(map(field_bytes, group.fields))


# ── bytes of a token ───────────────────────────────────────────────────────────────────────────────────


def has_scale(field: CacheField) -> bool:
    return field.dtype in KV_SCALE_BYTES


def scale_bytes(field: CacheField) -> int:
    """Return the bytes of the scales of one token in one field."""
    return prod(field.shape[:-1]) * KV_SCALE_BYTES.get(field.dtype, 0)


def field_bytes(field: CacheField) -> int:
    """Return the bytes of one token in one field, including scales."""
    return int(prod(field.shape) * bytes_per_value(field.dtype)) + scale_bytes(field)


def _layer_bytes(fields: Sequence[CacheField]) -> int:
    """Return the bytes of one token in one layer, without scales."""
    return sum(map(value_bytes, fields))


def value_bytes(field: CacheField) -> int:
    """Return the bytes of one token in one field, without scales."""
    return field_bytes(field) - scale_bytes(field)


def fields_per_row(fields: Sequence[CacheField]) -> int:
    """Return how many of a layer's fields are one row of memory that groups share: all, if their sizes differ."""
    return 1 if len({value_bytes(field) for field in fields}) == 1 else len(fields)


def _unit_bytes(fields: Sequence[CacheField]) -> int:
    """Return the bytes of one token in one row, for groups with different fields that share memory."""
    return _layer_bytes(fields[: fields_per_row(fields)])


# ── cutting layers into groups ─────────────────────────────────────────────────────────────────────────

Kinds = dict[CachePart, list[int]]


def _layers_by_kind(spec: ModelSpec, dtypes: CacheDtypes) -> Kinds:
    """Return the layer numbers by fields and window; layers without a window come first."""
    found: Kinds = {}
    for number, layer in enumerate(spec.layers):
        for part in chain.from_iterable(map(cache_parts, layer.mixers)):
            fields = tuple(dtypes.resolved(field) for field in part.fields)
            found.setdefault(replace(part, fields=fields), []).append(number)
    return dict(sorted(_joined(found).items(), key=lambda item: _order(item[0])))


def _joined(found: Kinds) -> Kinds:
    """Join paged parts that all layers have (latents and keys of an index) into one, with one block table."""
    paged = {part: layers for part, layers in found.items() if part.kind == "paged"}
    if len(paged) < 2 or len({(part.window, tuple(layers)) for part, layers in paged.items()}) > 1:
        return found
    first, layers = next(iter(paged.items()))
    fields = tuple(field for part in paged for field in part.fields)
    others = {part: layers for part, layers in found.items() if part.kind != "paged"}
    return {replace(first, fields=fields): layers, **others}


def cache_parts(mixer: MixerSpec) -> tuple[CachePart, ...]:
    """Return the fields that a mixer stores, by kind."""
    if isinstance(mixer, ShortConv):
        return (CachePart("paged", mixer.cache_fields(), mixer.window),)
    return mixer.cache_parts()


def _order(part: CachePart) -> tuple[int, bool, int]:
    return REGIONS.index(part.kind), part.window is not None, part.window or 0


def _block_bytes_per_token(kinds: Kinds) -> int:
    """Return the largest block size (in bytes per token) whose unused part is small, or else the one that wastes least.

    Only kinds that hold many blocks count: those without a window, or with one of at least `SHORT_WINDOW`.
    """
    is_uniform = len({part.fields for part in kinds}) == 1
    sizes = {part: (_layer_bytes(part.fields), len(layers)) for part, layers in kinds.items()}
    counted = [size for part, size in sizes.items() if part.window is None or part.window >= SHORT_WINDOW]
    counted = counted or list(sizes.values())
    largest = max(each for each, _ in sizes.values())  # a block holds at least one layer of any kind
    step = largest if is_uniform else lcm(*(_unit_bytes(part.fields) for part in kinds))
    limit = max(largest, min(each * count for each, count in counted))
    used = sum(each * count for each, count in counted)

    def padding(size: int) -> float:
        return sum(ceil(count / (size // each)) * size for each, count in counted) / used - 1

    candidates = [steps * step for steps in range(ceil(largest / step), ceil(limit / step) + 1)]
    fitting = [size for size in candidates if padding(size) <= MAX_PADDING]
    return max(fitting) if fitting else min(candidates, key=lambda size: (padding(size), -size))


# ── entries of block tables ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class EntryRule:
    """Determines which entries of its block tables a group needs, by arithmetic on positions."""

    kind: CacheKind
    window: int | None
    block_size: int
    chunk: int = CHUNK  # tokens between two states

    def __post_init__(self) -> None:
        if self.kind != "paged" and self.chunk % self.block_size:
            raise InvalidConfig(
                f"block_size must divide {self.chunk} for models with recurrent layers, got {self.block_size}",
                param="block_size",
            )

    @cached_property
    def region(self) -> int:
        return REGIONS.index(self.kind)

    @cached_property
    def tokens(self) -> int:
        """The number of tokens between two entries."""
        return self.chunk if self.kind == "state" else self.block_size

    @property
    def keeps_all(self) -> bool:
        """True if queries see every entry from the first on."""
        return self.kind == "paged" and self.window is None

    def first_visible(self, position: int) -> int:
        """Return the first entry that a query at `position` or later needs.

        keys:  [ ... | position - window + 1 ............ position ]
                       ▲ in this block
        """
        if self.kind == "state":
            return max(0, position // self.chunk - 1)
        if self.kind == "cells":
            return position // self.chunk * self.chunk // self.block_size
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def written(self, start: int, end: int) -> range:
        """Return the entries that computing tokens [start, end) writes."""
        if self.kind == "state":
            return range(start // self.chunk, end // self.chunk)
        return range(start // self.block_size, (end - 1) // self.block_size + 1)

    def required(self, start: int, end: int, *, is_certain: bool) -> range:
        """Return the written entries that must be kept: of cells and states, if the tokens are certain (no drafts),
        only those that a query at `end` sees."""
        written = self.written(start, end)
        if self.kind == "paged" or not is_certain:
            return written
        return range(max(written.start, min(self.first_visible(end), written.stop)), written.stop)

    def max_held(self, num_tokens: int, max_step: int) -> int:
        """Return the most entries that one sequence holds at a time until `num_tokens` are computed, in steps of up to
        `max_step` tokens.

        A window group holds the blocks that the queries of a step see:  [ window - 1 tokens before | step ], which may
        start anywhere in a block, hence one block more. Cells are held for the chunk in which a step starts and the one
        in which it ends; of states, the one that it reads and the one that it writes.
        """
        everything = num_tokens // self.chunk if self.kind == "state" else ceil(num_tokens / self.block_size)
        if self.kind == "state":
            return min(everything, 2)
        if self.kind == "cells":
            return min(everything, 2 * self.chunk // self.block_size)
        if self.window is None:
            return everything
        return min(everything, ceil((self.window - 1 + max_step) / self.block_size) + 1)

    def last_block(self, entry: int) -> int:
        """Return the block of tokens that completes an entry: the entry is registered under that block's hash."""
        return (entry + 1) * self.tokens // self.block_size - 1
