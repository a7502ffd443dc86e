"""How a model's layers share one pool of KV blocks. Pure data, no torch.

Layers that look back equally far need the same blocks at the same time, so they are kept in groups. Every group
has the same number of layers, hence every block has the same size and one pool of block ids serves all groups:

    18 layers, every sixth one global        block id 7, owned by group 0    block id 9, owned by group 1
    group 0  (window None)  layers 5 11 17   ┌ layer 5 ┬ layer 11 ┬ layer 17 ┐  ┌ layer 0 ┬ layer 1 ┬ layer 2 ┐
    group 1  (window 512)   layers 0 1 2     │  K , V  │  K , V   │  K , V   │  │  K , V  │  K , V  │  K , V  │
    group 2  (window 512)   layers 3 4 6     └─────────┴──────────┴──────────┘  └─────────┴─────────┴─────────┘
    ...

A sequence holds one block table per group. A window group gives back blocks it can no longer see; a block given back
by one group may be taken by another. Where the sizes do not divide, the last group of a window has unused places.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tokenmill.arch.cost import kv_vector_bytes
from tokenmill.arch.spec import ModelSpec
from tokenmill.errors import UnsupportedModel

MAX_PADDING = 0.1  # unused places may be a tenth of the layers; beyond that smaller groups are better


@dataclass(frozen=True)
class KVGroup:
    """Layers that share a block table; `window` is how far they look back (None: to the beginning)."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KVLayout:
    groups: tuple[KVGroup, ...]
    layers_per_group: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> KVLayout:
        num_kv_heads, head_dim = _cache_shape(spec)
        by_window = _layers_by_window(spec)
        size = _group_size([len(layers) for layers in by_window.values()])
        groups = tuple(
            KVGroup(window, tuple(layers[start : start + size]))
            for window, layers in by_window.items()
            for start in range(0, len(layers), size)
        )
        return cls(groups, size, num_kv_heads, head_dim)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self.groups)

    def place(self, layer: int) -> tuple[int, int]:
        """(group, index within the group) of a layer."""
        for number, group in enumerate(self.groups):
            if layer in group.layers:
                return number, group.layers.index(layer)
        raise IndexError(f"layer {layer} is not in the layout")

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """Keys and values of one block of `block_size` tokens, with their scales where they are rounded."""
        return 2 * self.layers_per_group * self.num_kv_heads * block_size * kv_vector_bytes(self.head_dim, dtype)


def blocks_in_group(window: int | None, num_tokens: int, chunk: int, block_size: int) -> int:
    """Blocks that one sequence holds at most in a group on its way to `num_tokens`, in steps of up to `chunk` tokens.

    A window group holds what the queries of a chunk see:  [ window - 1 tokens before | chunk ], which may begin
    anywhere in a block, hence one block more. The scheduler admits by this count, and pools are sized with it.
    """
    everything = ceil(num_tokens / block_size)
    return everything if window is None else min(everything, ceil((window - 1 + chunk) / block_size) + 1)


def _cache_shape(spec: ModelSpec) -> tuple[int, int]:
    shapes = {(layer.attention.num_kv_heads, layer.attention.head_dim) for layer in spec.layers}
    if len(shapes) != 1:
        found = ", ".join(f"{heads} x {dim}" for heads, dim in sorted(shapes))
        raise UnsupportedModel(f"{spec.family}: layers with different KV shapes (heads x head_dim: {found})")
    return shapes.pop()


def _layers_by_window(spec: ModelSpec) -> dict[int | None, list[int]]:
    """Layer numbers per window; layers without one come first."""
    found: dict[int | None, list[int]] = {}
    for number, layer in enumerate(spec.layers):
        found.setdefault(layer.attention.window, []).append(number)
    return dict(sorted(found.items(), key=lambda item: (item[0] is not None, item[0] or 0)))


def _group_size(counts: list[int]) -> int:
    """The largest group size whose unused places are few; size 1 has none, so there always is one."""
    for size in range(min(counts), 0, -1):
        padding = sum(ceil(count / size) * size - count for count in counts)
        if padding <= MAX_PADDING * sum(counts):
            return size
    raise AssertionError("a model has at least one layer")
