"""The regions of a layer name every tensor that the layer has, each once; mixers have a few of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tokenmill.arch.regions import Attend, Experts, GatedMlp, Matrices, NormProject, ProjectAdd, Region, layer_regions
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, MoeSpec, ShortConv
from tokenmill.arch.tensors import layer_tensors

ATTENTION = Gqa(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5, rope=None)
BIASED = Gqa(
    num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5, rope=None, qkv_bias=True, out_bias=True, qk_norm=True,
    has_sinks=True,
)  # fmt: skip
SHARED = MoeSpec(4, 2, MlpSpec(24), renormalize=True, shared=MlpSpec(40), has_shared_gate=True)
LAYERS = {
    "plain": LayerSpec(ATTENTION, MlpSpec(80)),
    "biases, norms and sinks": LayerSpec(BIASED, MlpSpec(80, bias=True), post_norms=True),
    "experts": LayerSpec(ATTENTION, MoeSpec(4, 2, MlpSpec(24), renormalize=True), post_norms=True),
    "a shared expert": LayerSpec(ATTENTION, SHARED),
    "a convolution": LayerSpec(ShortConv(32, kernel=3), MlpSpec(80)),
}
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
            experts = (region.gates, region.ups, region.downs)
            yield from of_norms(region.norm, region.post_norm, region.shared_gate, *experts)
            for matrices in (region.router, *(region.shared or ())):
                yield from of_matrices(matrices)


@pytest.mark.parametrize("name", LAYERS)
def test_regions_name_all_tensors_of_a_layer(name: str) -> None:
    regions = layer_regions(LAYERS[name], 7)
    found = [tensor for region in regions for tensor in named(region)]
    tensors = {tensor.name for tensor in layer_tensors(LAYERS[name], 32, "layers.7.")}
    assert len(found) == len(set(found))
    assert tensors - set(found) == {tensor for tensor in tensors if tensor.removeprefix("layers.7.") in OF_MIXERS}
    assert set(found) <= tensors


def test_the_mixer_stands_between_its_projections() -> None:
    kinds = [type(region) for region in layer_regions(LAYERS["plain"], 0)]
    assert kinds == [NormProject, Attend, ProjectAdd, GatedMlp]
