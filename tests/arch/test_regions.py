"""The regions of a layer name every tensor that the layer has, each once; mixers have a few of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tokenmill.arch.regions import (
    AddInput,
    Experts,
    GatedMlp,
    Matrices,
    NormProject,
    ProjectAdd,
    Region,
    SideBySide,
    layer_regions,
)
from tokenmill.arch.spec import AttentionGate, Gqa, LayerSpec, MlpSpec, MoeSpec, RoutingSpec, ShortConv
from tokenmill.arch.tensors import layer_tensors

ATTENTION = Gqa(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5, rope=None)
BIASED = Gqa(
    num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5, rope=None, qkv_bias=True, out_bias=True, qk_norm="head",
    has_sinks=True,
)  # fmt: skip
SHARED = MoeSpec(4, 2, MlpSpec(24), shared=MlpSpec(40), has_shared_gate=True)
LAYERS = {
    "plain": LayerSpec(ATTENTION, MlpSpec(80)),
    "biases, norms and sinks": LayerSpec(BIASED, MlpSpec(80, bias=True), norms="both"),
    "experts": LayerSpec(ATTENTION, MoeSpec(4, 2, MlpSpec(24)), norms="both"),
    "a shared expert": LayerSpec(ATTENTION, SHARED),
    "a convolution": LayerSpec(ShortConv(32, kernel=3), MlpSpec(80)),
    "norms behind": LayerSpec(ATTENTION, MlpSpec(80, is_gated=False, activation="relu2"), norms="after"),
    "parallel": LayerSpec(ATTENTION, MlpSpec(80), is_parallel=True),
    "gated attention": LayerSpec(replace(ATTENTION, gate=AttentionGate()), MlpSpec(80), has_scale=True),
    "another layer's keys": LayerSpec(replace(BIASED, shares_kv_of=2), MlpSpec(80), input_width=8),
    "every kind of routing": LayerSpec(
        ATTENTION, MlpSpec(80), norms="both", side_experts=MoeSpec(
            4, 2, MlpSpec(24, bias=True), RoutingSpec(
                has_router_bias=True, has_choice_bias=True, has_expert_scales=True, has_input_norm=True
            ), latent_size=16,
        ),
    ),
}  # fmt: skip
OF_MIXERS = {"q_norm.weight", "k_norm.weight", "sinks", "conv.weight", "conv.bias"}


def of_matrices(matrices: Matrices) -> Iterator[str]:
    for name in matrices.names:
        yield f"{name}.weight"
        if matrices.has_bias:
            yield f"{name}.bias"


def of_norms(*names: str | None) -> Iterator[str]:
    yield from (f"{name}.weight" for name in names if name is not None)


def named(region: Region) -> Iterator[str]:
    match region:
        case NormProject(norm, projection):
            yield from (*of_norms(norm), *of_matrices(projection))
        case ProjectAdd(projection, post_norm):
            yield from (*of_matrices(projection), *of_norms(post_norm))
        case GatedMlp(norm, gate_up, down, _, post_norm):
            yield from (*of_norms(norm, post_norm), *of_matrices(gate_up), *of_matrices(down))
        case Experts():
            experts = tuple(name for name in (region.gates, region.ups, region.downs) if name)
            yield from of_matrices(Matrices(experts, region.spec.expert.bias))
            yield from of_norms(region.norm, region.post_norm, region.shared_gate, region.router_norm)
            yield from (name for name in (region.choice_bias, region.expert_scales) if name)
            for matrices in (region.router, *(region.shared or ()), *(region.latent or ())):
                yield from of_matrices(matrices)
        case SideBySide(mlp, experts, post_norm):
            yield from (*named(mlp), *named(experts), *of_norms(post_norm))
        case AddInput(gate, up, norm):
            yield from (*of_matrices(gate), *of_matrices(up), *of_norms(norm))


@pytest.mark.parametrize("name", LAYERS)
def test_regions_name_all_tensors_of_a_layer(name: str) -> None:
    regions = layer_regions(LAYERS[name], 7)
    parts = (regions.project, regions.attend, regions.add, regions.feed, regions.add_input)
    found = [tensor for region in parts if region is not None for tensor in named(region)]
    found += [] if regions.scale is None else [regions.scale]
    if regions.is_parallel:
        found.remove("layers.7.attn_norm.weight")  # of which mixer and MLP read the same
    tensors = {tensor.name for tensor in layer_tensors(LAYERS[name], 32, "layers.7.")}
    assert len(found) == len(set(found))
    assert tensors - set(found) == {tensor for tensor in tensors if tensor.removeprefix("layers.7.") in OF_MIXERS}
    assert set(found) <= tensors
