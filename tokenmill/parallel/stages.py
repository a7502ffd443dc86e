"""Pipeline parallelism: which layers each stage has, chosen to balance their cost. No torch.

    stage 0   embedding │ layers 0 … a-1 │ head and sampling
    stage 1             │ layers a … b-1 │
    stage 2             │ layers b … n-1 │ final norm

A step's residual stream goes from stage to stage; the last stage's output returns to the first, which computes the head
and samples all tokens: it has the embedding, and small models mostly share that matrix with the head. The cost of a
layer is the number of weights that a token reads; the head counts towards the first stage, which gets fewer layers.

Ranks are numbered stage by stage: rank = stage * tp + index within the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from tokenmill.arch.spec import Gqa, Mla, ModelSpec, MoeSpec
from tokenmill.arch.tensors import layer_tensors, tensors_of

Borders = tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """The grid of ranks: `pp` stages of `tp` ranks each."""

    tp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.pp

    def stage(self, rank: int) -> int:
        return rank // self.tp

    def place(self, rank: int) -> int:
        """Return the index of a rank among those of its stage."""
        return rank % self.tp

    def before(self, rank: int) -> int:
        """Return the rank that sends to this one: in the previous stage, or in the last stage for the first one."""
        return (rank - self.tp) % self.size


def layer_costs(spec: ModelSpec) -> list[float]:
    """Return the number of weights that a token reads in each layer."""
    costs: dict[object, float] = {}
    for layer in dict.fromkeys(spec.layers):
        moe = next((feed for feed in (layer.side_experts, layer.mlp) if isinstance(feed, MoeSpec)), None)
        share = 1.0 if moe is None else moe.num_active / moe.num_experts
        tensors = layer_tensors(layer, spec.hidden_size, norm=spec.norm)
        costs[layer] = sum(prod(one.shape) * (share if len(one.shape) == 3 else 1.0) for one in tensors)
    return [costs[layer] for layer in spec.layers]


def head_cost(spec: ModelSpec) -> float:
    return float(spec.vocab_size * spec.hidden_size)


def stage_borders(spec: ModelSpec) -> list[int]:
    """Return the layers at which a stage may begin: not between a layer and a later one that reads its cache."""
    sources = list(range(spec.num_layers))  # the layer whose cache each one reads
    for number, layer in enumerate(spec.layers):
        mixer = layer.mixer
        source = None
        if isinstance(mixer, Gqa):
            source = mixer.shares_kv_of
        elif isinstance(mixer, Mla):
            source = mixer.shares_index_of
        if source is not None:
            sources[number] = source
    first_needed = list(accumulate(reversed(sources), min))[::-1]  # the first layer that this and later layers read
    return [number for number in range(1, spec.num_layers) if first_needed[number] >= number]


def stage_limits(spec: ModelSpec, pp: int) -> str | None:
    """Return why a model can't be divided into this many stages; None if it can."""
    if spec.input_width:
        return "this model has per-layer embeddings, which only the first stage could look up"
    if spec.streams is not None:
        return "this model has several residual streams"
    if (num_borders := len(stage_borders(spec))) < pp - 1:
        return f"the {spec.num_layers} layers of this model allow at most {num_borders + 1} stages"
    return None


def split_layers(spec: ModelSpec, pp: int) -> list[range]:
    """Return the layers of each stage such that the most expensive stage is as cheap as possible; of ties the first."""
    costs = layer_costs(spec)
    sums = [0.0, *accumulate(costs)]
    stops = [*stage_borders(spec), spec.num_layers]
    # best[p]: for stages that cover layers [0, p), the cost of the most expensive one, and their borders
    best: dict[int, tuple[float, Borders]] = {stop: (head_cost(spec) + sums[stop], (0, stop)) for stop in stops}
    for _ in range(pp - 1):
        best = {
            stop: min((max(cost, sums[stop] - sums[start]), (*borders, stop)) for start, (cost, borders) in shorter)
            for stop in stops
            if (shorter := [(start, one) for start, one in best.items() if start < stop])
        }
    return [range(start, stop) for start, stop in pairwise(best[spec.num_layers][1])]


def stage_share(spec: ModelSpec, layers: range) -> float:
    """Return the fraction of a model's weights that a stage has, 0 to 1."""
    sizes = {name: prod(one.shape) for name, one in tensors_of(spec).items()}
    return sum(size for name, size in sizes.items() if has_tensor(spec, layers, name)) / sum(sizes.values())


def has_tensor(spec: ModelSpec, layers: range, name: str) -> bool:
    """Return whether a stage has a tensor."""
    part, _, rest = name.partition(".")
    if part == "layers":
        return int(rest.partition(".")[0]) in layers
    return layers.stop == spec.num_layers if part == "final_norm" else layers.start == 0
