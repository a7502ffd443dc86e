"""Where each of our tensors lies in a checkpoint: name patterns and transformations, as data.

    Rule          per family: our name pattern → their name pattern (+ what to do with it)
    TensorSource  per model: our name → the checkpoint tensors it is made of, ready to read

Transformations, all of them on whole rows, so that quantised rows take part:
    fused        theirs holds several of ours, rows one after another (Phi-3's qkv_proj)
    {e}          one of theirs per expert, stacked into one of ours
    add          a constant added to each value (Gemma stores a norm's weight minus one)
    unit_axis    theirs has an axis of length one that ours has not (the channel axis of a depthwise convolution)
    interleaved  rows of each head alternate between the two halves of the rotation (GGUF's llama files);
                 ours has the first half, then the second
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from tokenmill.arch.tensors import tensors_of


@dataclass(frozen=True)
class Rule:
    pattern: str  # theirs, with {i} for the layer and {e} for the expert
    fused: tuple[str, ...] = ()  # our parts, in the order of their rows in the fused tensor
    add: float = 0.0
    interleaved: bool = False
    unit_axis: int | None = None


Rules = Mapping[str, Rule]


@dataclass(frozen=True)
class TensorSource:
    """One of our tensors, out of the checkpoint's. With several `names` they are stacked along a new first axis."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # each of theirs
    rows: tuple[int, int] | None = None  # which of its rows are ours (the axis before the last, or the only one)
    add: float = 0.0
    unit_axis: int | None = None  # of theirs, which is dropped
    interleaved_heads: int = 0  # 0: rows are in our order already
    rotary_dim: int = 0


def sources_of(spec: ModelSpec, rules: Rules) -> dict[str, TensorSource]:
    return {name: _source(spec, rules, name, tensor.shape) for name, tensor in tensors_of(spec).items()}


def _source(spec: ModelSpec, rules: Rules, name: str, shape: tuple[int, ...]) -> TensorSource:
    if not name.startswith("layers."):
        return TensorSource((rules[name].pattern,), shape, add=rules[name].add)
    _, index, part = name.split(".", 2)
    layer, rule = spec.layers[int(index)], rules["layers.{i}." + part]
    source = TensorSource((rule.pattern.replace("{i}", index),), shape, add=rule.add)
    if rule.interleaved:
        source = _interleaved(source, layer, part)
    if rule.unit_axis is not None:
        at = rule.unit_axis
        source = replace(source, shape=(*shape[:at], 1, *shape[at:]), unit_axis=at)
    if rule.fused:
        source = _fused(source, layer, rule, part)
    if "{e}" in rule.pattern:
        source = _per_expert(source)
    return source


def _interleaved(source: TensorSource, layer: LayerSpec, part: str) -> TensorSource:
    attention = layer.mixer
    if not isinstance(attention, Gqa) or attention.rope is None:
        return source
    heads = attention.num_heads if part.startswith("q") else attention.num_kv_heads
    return replace(source, interleaved_heads=heads, rotary_dim=attention.rope.rotary_dim)


def _fused(source: TensorSource, layer: LayerSpec, rule: Rule, part: str) -> TensorSource:
    """
    theirs:  [ q rows ... | k rows ... | v rows ... ]
    ours:                 ^start       ^end            for k
    """
    ours = part.removeprefix("experts.").split(".")[0]
    sizes = {name: _num_rows(layer, name) for name in rule.fused}
    start = sum(sizes[name] for name in rule.fused[: rule.fused.index(ours)])
    axis = -2 if part.endswith(".weight") else -1
    shape = list(source.shape)
    shape[axis] = sum(sizes.values())
    return replace(source, shape=tuple(shape), rows=(start, start + sizes[ours]))


def _num_rows(layer: LayerSpec, part: str) -> int:
    attention, mlp = layer.mixer, layer.mlp
    expert = mlp.expert if isinstance(mlp, MoeSpec) else mlp
    assert isinstance(expert, MlpSpec)
    sizes = {"gate": expert.intermediate_size, "up": expert.intermediate_size}
    if isinstance(attention, Gqa):
        sizes |= {"q": attention.q_size, "k": attention.kv_size, "v": attention.kv_size}
    return sizes[part]


def _per_expert(source: TensorSource) -> TensorSource:
    names = tuple(source.names[0].replace("{e}", str(expert)) for expert in range(source.shape[0]))
    return replace(source, names=names, shape=source.shape[1:])
