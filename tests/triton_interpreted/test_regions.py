"""Regions of a layer: which are fused for which weights and batches, and that those agree with the composed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.triton_inputs import assert_near, pack_as_file
from tokenmill.arch.spec import MlpSpec, MoeSpec
from tokenmill.models.linear import Projection
from tokenmill.ops.batch import Mode
from tokenmill.ops.compose import BatchClasses, PlainStream, choose_regions
from tokenmill.ops.interface import (
    ExpertsWeight,
    GatedMlpWeights,
    LayerWeights,
    LinearWeight,
    MoeWeights,
    Norm,
    Regions,
)
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.quant import quantized
from tokenmill.parallel.group import Gather
from tokenmill.parallel.threads import ThreadGroup

OPS, STEADY = build_ops(), build_ops(deterministic=True)
CLASSES = BatchClasses(OPS.row_borders(torch.device("cpu")))
EPS, HIDDEN, INTER = 1e-5, 256, 1280
NORM = Norm(torch.rand(HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.5, EPS)
Pack = Callable[[int, int], Any]


def plain(num_out: int, num_in: int) -> torch.Tensor:
    return torch.randn(num_out, num_in).bfloat16()


PACKS: dict[str, Pack] = {
    "fp8": lambda num_out, num_in: quantized.to_fp8(torch.randn(num_out, num_in)),
    "int4": lambda num_out, num_in: quantized.to_int4(torch.randn(num_out, num_in)),
    "Q4_K": lambda num_out, num_in: pack_as_file("Q4_K", num_out, num_in),
    "plain": plain,
}


def projection(pack: Pack, num_out: int, num_in: int) -> Projection:
    return Projection(OPS, LinearWeight(num_out, num_in, pack(num_out, num_in)))


def layer_of(pack: Pack) -> LayerWeights:
    feed = GatedMlpWeights(NORM, projection(pack, 2 * INTER, HIDDEN), projection(pack, HIDDEN, INTER), "silu")
    return LayerWeights(NORM, projection(pack, 96, HIDDEN), projection(pack, HIDDEN, 256), None, feed)


def chosen(layer: LayerWeights, num_rows: int, mode: Mode = "eager", *, gathers: bool = False) -> Regions:
    (table,) = choose_regions(OPS, [layer], CLASSES)
    return table[CLASSES.of(num_rows, mode, gathers=gathers)]


def fused(regions: Regions) -> set[str]:
    """The names of regions that are not those of small ops"""
    composed = ("ComposedRegions.", "PlainStream", "gather")
    names = ("norm_project", "project_add", "gated_mlp", "experts")
    return {name for name in names if not getattr(regions, name).__qualname__.startswith(composed)}


@pytest.mark.parametrize(
    ("kind", "few", "many"),
    [
        ("plain", set(), {"project_add", "gated_mlp"}),
        ("int4", set(), set()),
        ("fp8", {"norm_project", "project_add", "gated_mlp"}, {"norm_project", "project_add", "gated_mlp"}),
    ],
)
def test_which_regions_are_fused_depends_on_weights_and_rows(kind: str, few: set[str], many: set[str]) -> None:
    layer = layer_of(PACKS[kind])
    for mode in ("eager", "captured"):
        for num_rows in (2, 4, 5, 511):
            assert fused(chosen(layer, num_rows, mode)) == few, num_rows
        for num_rows in (512, 5000):
            assert fused(chosen(layer, num_rows, mode)) == many, num_rows
    one = {"norm_project", "project_add", "gated_mlp"} if kind != "plain" else {"norm_project"}
    assert fused(chosen(layer, 1)) == one


def test_a_layer_that_gathers_rows_is_composed_where_norms_are_quantised() -> None:
    for num_rows in (0, 1, 600):
        assert not fused(chosen(layer_of(PACKS["fp8"]), num_rows, gathers=True))
    assert fused(chosen(layer_of(plain), 600, gathers=True)) == {"project_add", "gated_mlp"}


def test_what_is_added_to_a_product_keeps_it_from_being_fused() -> None:
    layer = layer_of(plain)
    assert isinstance(layer.project_out, Projection)
    biased = replace(layer.project_out, weight=replace(layer.project_out.weight, bias=torch.zeros(HIDDEN)))
    gathered = replace(layer.project_out, outputs=Gather(ThreadGroup.make(2)[0], ()))
    for other in (biased, gathered):
        assert fused(chosen(replace(layer, project_out=other), 600)) == {"gated_mlp"}
    assert fused(chosen(replace(layer, post_norm=NORM), 600)) == {"gated_mlp"}


def test_among_several_streams_nothing_is_added_in_place() -> None:
    """What a layer adds is asked for, and the stream that it was given is read again."""
    layer = replace(layer_of(plain), has_streams=True)
    many = chosen(layer, 4096)
    assert fused(many) == set() and fused(chosen(replace(layer, has_streams=False), 4096)) >= {"gated_mlp"}
    x = torch.randn(2, HIDDEN).bfloat16()
    before = x.clone()
    fed = many.gated_mlp(many.begin(x), layer.feed)  # type: ignore[arg-type]
    assert torch.equal(x, before)
    assert_near(many.whole(fed), x + many.added(fed))


def test_one_matrix_of_another_form_keeps_all_layers_from_quantised_norms() -> None:
    layers = [layer_of(PACKS["int4"]), layer_of(plain)]
    tables = choose_regions(OPS, layers, CLASSES)
    assert [fused(table[CLASSES.of(1, "eager")]) for table in tables] == [set(), {"norm_project"}]


@pytest.mark.parametrize("has_delta", [True, False])
def test_norm_and_projection_of_a_single_row(has_delta: bool) -> None:
    layer = layer_of(plain)
    assert isinstance(layer.project_in, Projection)
    biased = replace(layer.project_in, weight=replace(layer.project_in.weight, bias=torch.randn(96).bfloat16()))
    stream = PlainStream(torch.randn(1, HIDDEN).bfloat16(), torch.randn(1, HIDDEN).bfloat16() if has_delta else None)
    for own in (layer.project_in, biased):
        found, left = chosen(layer, 1).norm_project(stream, NORM, own)
        (composed,) = PLAIN.choose_regions(PLAIN, [layer], CLASSES.of(1, "eager"))
        expected, total = composed.norm_project(stream, NORM, own)
        assert_near(found.float(), expected.float(), 0.01)
        assert_near(left.residual.float(), total.residual.float(), 0.01)  # the interpreter rounds down
        assert left.delta is None


def test_experts_of_up_to_four_tokens_are_fused() -> None:
    experts = ExpertsWeight(3, (torch.randn(3, 64, HIDDEN), torch.randn(3, HIDDEN, 32)))
    spec = MoeSpec(3, 2, MlpSpec(32))
    moe = MoeWeights(NORM, projection(lambda *shape: torch.randn(*shape), 3, HIDDEN), experts, spec)
    layer = replace(layer_of(lambda *shape: torch.randn(*shape)), feed=moe)
    assert [fused(chosen(layer, num_rows)) for num_rows in (0, 1, 4, 5)] == [set(), {"experts"}, {"experts"}, set()]
    stream = PlainStream(torch.randn(4, HIDDEN), torch.randn(4, HIDDEN))
    found, expected = (chosen(layer, rows).experts(stream, moe) for rows in (4, 5))
    assert_near(found.residual, expected.residual)
    assert_near(found.delta, expected.delta, 1e-4)


def test_deterministic_regions_are_composed() -> None:
    layer = layer_of(plain)
    (table,) = choose_regions(STEADY, [layer], CLASSES)
    assert not any(map(fused, table.values()))


@pytest.mark.parametrize(("kind", "num_rows", "tolerance"), [("int4", 1, 1e-3), ("Q4_K", 1, 1e-3), ("fp8", 2, 0.01)])
def test_quantised_regions_agree_with_composed_ones(kind: str, num_rows: int, tolerance: float) -> None:
    layer = layer_of(PACKS[kind])
    regions = chosen(layer, num_rows)
    assert fused(regions) == {"norm_project", "project_add", "gated_mlp"}
    (composed,) = PLAIN.choose_regions(PLAIN, [layer], CLASSES.of(num_rows, "eager"))

    def expanded(packed: Any) -> Projection:
        weight = packed.weight
        return Projection(PLAIN, replace(weight, packed=quantized.expanded(weight.packed).float()))

    x, delta, values = torch.randn(num_rows, HIDDEN), torch.randn(num_rows, HIDDEN), torch.randn(num_rows, 256)
    projected, stream = regions.norm_project(PlainStream(x, delta), NORM, layer.project_in)
    expected, expected_stream = composed.norm_project(PlainStream(x, delta), NORM, expanded(layer.project_in))
    assert_near(stream.residual, expected_stream.residual)
    assert_near(projected, expected, tolerance)
    for post_norm in (None, NORM):
        found = regions.project_add(values, layer.project_out, stream, post_norm)
        wanted = composed.project_add(values, expanded(layer.project_out), expected_stream, post_norm)
        assert_near(found.delta, wanted.delta, tolerance)
    feed = layer.feed
    assert isinstance(feed, GatedMlpWeights)
    exact = replace(feed, gate_up=expanded(feed.gate_up), down=expanded(feed.down))
    found, wanted = regions.gated_mlp(wanted, feed), composed.gated_mlp(wanted, exact)
    assert_near(found.residual, wanted.residual)
    assert_near(found.delta, wanted.delta, tolerance)


def test_large_products_add_to_the_stream_themselves() -> None:
    layer, feed = layer_of(plain), layer_of(plain).feed
    assert isinstance(feed, GatedMlpWeights)
    x, values = torch.randn(600, HIDDEN).bfloat16(), torch.randn(600, 256).bfloat16()
    large, small = chosen(layer, 600), chosen(layer, 100)
    found = large.project_add(values, layer.project_out, PlainStream(x.clone()), None)
    wanted = small.project_add(values, layer.project_out, PlainStream(x), None)
    assert found.delta is None
    assert_near(found.residual, wanted.residual + wanted.delta, 5e-3)
    found, wanted = large.gated_mlp(PlainStream(x.clone()), feed), small.gated_mlp(PlainStream(x), feed)
    assert found.delta is None
    assert_near(found.residual, wanted.residual + wanted.delta, 5e-3)
