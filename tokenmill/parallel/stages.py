"""Stages of a pipeline: which layers a rank has, chosen by cost. No torch.

    stage 0   embedding │ layers 0 … a-1 │ head and sampling
    stage 1             │ layers a … b-1 │
    stage 2             │ layers b … n-1 │ final norm

The stream of a step goes from stage to stage, and what the last one has made of it comes back to the first, which has
the embedding and so, in most small models, the head's matrix already; there all tokens are sampled. Costs are weights
that a token reads; the head's count for the first stage, which has fewer layers for it.

Ranks are numbered stage by stage: rank = stage * tp + place among the ranks of its stage.
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
    """The numbers of stages and of ranks per stage, and each rank's position."""

    tp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.pp

    def stage(self, rank: int) -> int:
        return rank // self.tp

    def place(self, rank: int) -> int:
        """The place of a rank among those that compute the same layers."""
        return rank % self.tp

    def before(self, rank: int) -> int:
        """Return the rank that sends to this one: of the stage before, or of the last stage for the first."""
        return (rank - self.tp) % self.size


def layer_costs(spec: ModelSpec) -> list[float]:
    """Numbers of weights that a token reads in each layer."""
    costs: dict[object, float] = {}
    for layer in dict.fromkeys(spec.layers):
        moe = next((feed for feed in (layer.side_experts, layer.mlp) if isinstance(feed, MoeSpec)), None)
        share = 1.0 if moe is None else moe.num_active / moe.num_experts
        tensors = layer_tensors(layer, spec.hidden_size, norm=spec.norm)
        costs[layer] = sum(prod(one.shape) * (share if len(one.shape) == 3 else 1.0) for one in tensors)
    return [costs[layer] for layer in spec.layers]


def head_cost(spec: ModelSpec) -> float:
    return float(spec.vocab_size * spec.hidden_size)


def joints(spec: ModelSpec) -> list[int]:
    """Return the layers at which a stage may begin: not between a layer and a later one that reads its cache."""
    reaches = list(range(spec.num_layers))  # the first layer that each one reads from
    for number, layer in enumerate(spec.layers):
        mixer = layer.mixer
        source = None
        if isinstance(mixer, Gqa):
            source = mixer.shares_kv_of
        elif isinstance(mixer, Mla):
            source = mixer.shares_index_of
        if source is not None:
            reaches[number] = source
    first_needed = list(accumulate(reversed(reaches), min))[::-1]  # by all layers from here on
    return [number for number in range(1, spec.num_layers) if first_needed[number] >= number]


def stage_limits(spec: ModelSpec, pp: int) -> str | None:
    """Return why a model can't be divided into this many stages; None when it can."""
    if spec.input_width:
        return "each layer of this model has embeddings of its own, which only a first stage could look up"
    if spec.streams is not None:
        return "the layers of this model exchange several streams"
    if len(joints(spec)) < pp - 1:
        return f"the model has {spec.num_layers} layers, which can be parted at {len(joints(spec))} places"
    return None


def split_layers(spec: ModelSpec, pp: int) -> list[range]:
    """The layers of each stage, so that the costliest stage costs least; of equal cuts the first."""
    costs = layer_costs(spec)
    sums = [0.0, *accumulate(costs)]
    places = [0, *joints(spec), spec.num_layers]
    # best[p]: the cost of the costliest of the stages so far, if they end before layer p, and their borders
    best: dict[int, tuple[float, Borders]] = {stop: (head_cost(spec) + sums[stop], (0, stop)) for stop in places[1:]}
    for _ in range(pp - 1):
        best = {
            stop: min((max(cost, sums[stop] - sums[start]), (*borders, stop)) for start, (cost, borders) in shorter)
            for stop in places[1:]
            if (shorter := [(start, one) for start, one in best.items() if start < stop])
        }
    return [range(start, stop) for start, stop in pairwise(best[spec.num_layers][1])]


def stage_share(spec: ModelSpec, layers: range) -> float:
    """Return the fraction of a model's weights that a stage has, 0 to 1."""
    sizes = {name: prod(one.shape) for name, one in tensors_of(spec).items()}
    return sum(size for name, size in sizes.items() if has_tensor(spec, layers, name)) / sum(sizes.values())


def has_tensor(spec: ModelSpec, layers: range, name: str) -> bool:
    """Tell whether a stage has a tensor."""
    part, _, rest = name.partition(".")
    if part == "layers":
        return int(rest.partition(".")[0]) in layers
    return layers.stop == spec.num_layers if part == "final_norm" else layers.start == 0
