"""Regions composed of small ops, against the formulas written out; and the classes of batches they are chosen for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tokenmill.arch.spec import MlpSpec, MoeSpec
from tokenmill.models.linear import Projection
from tokenmill.ops.batch import Mode
from tokenmill.ops.compose import BatchClasses, ComposedRegions, choose_regions
from tokenmill.ops.interface import (
    BatchClass,
    ExpertsWeight,
    GatedMlpWeights,
    LayerWeights,
    LinearWeight,
    MoeWeights,
    Norm,
    Ops,
    Regions,
    SharedExpert,
)
from tokenmill.ops.reference import REFERENCE_OPS as OPS

HIDDEN, INTER, ROWS = 24, 40, 5
REGIONS = ComposedRegions(OPS, "eager").table()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def projection(num_out: int, num_in: int) -> Projection:
    return Projection(OPS, LinearWeight(num_out, num_in, torch.randn(num_out, num_in), torch.randn(num_out)))


def norm() -> Norm:
    return Norm(torch.rand(HIDDEN) + 0.5, 1e-5)


def times(x: torch.Tensor, projection: Any) -> torch.Tensor:
    return functional.linear(x, projection.weight.packed, projection.weight.bias)


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return functional.rms_norm(x, (HIDDEN,), norm.weight, norm.eps)


def mlp(x: torch.Tensor, gate_up: Any, down: Any) -> torch.Tensor:
    gate, up = times(x, gate_up).chunk(2, dim=-1)
    return times(functional.silu(gate) * up, down)


@pytest.mark.parametrize("has_post_norms", [False, True])
def test_a_layer_s_regions_one_after_another(has_post_norms: bool) -> None:
    x, before, after, end = torch.randn(ROWS, HIDDEN), norm(), norm(), norm()
    post_norm = norm() if has_post_norms else None
    project_in, project_out = projection(16, HIDDEN), projection(HIDDEN, 16)
    feed = GatedMlpWeights(after, projection(2 * INTER, HIDDEN), projection(HIDDEN, INTER), "silu", post_norm)

    activations, stream = REGIONS.norm_project(REGIONS.begin(x), before, project_in)
    torch.testing.assert_close(activations, times(normed(x, before), project_in))
    stream = REGIONS.project_add(activations, project_out, stream, post_norm)
    stream = REGIONS.gated_mlp(stream, feed)

    def post(result: torch.Tensor) -> torch.Tensor:
        return result if post_norm is None else normed(result, post_norm)

    total = x + post(times(activations, project_out))
    total = total + post(mlp(normed(total, after), feed.gate_up, feed.down))
    torch.testing.assert_close(REGIONS.finish(stream, end), normed(total, end))
    rows = torch.tensor([3, 0])
    torch.testing.assert_close(REGIONS.finish(REGIONS.gather(stream, rows), end), normed(total[rows], end))


@pytest.mark.parametrize("gate", [None, torch.randn(HIDDEN)], ids=["no gate", "gate"])
def test_a_shared_expert_is_added_to_the_chosen_ones(gate: torch.Tensor | None) -> None:
    x, before = torch.randn(ROWS, HIDDEN), norm()
    matrices = torch.randn(3, 2 * 8, HIDDEN), torch.randn(3, HIDDEN, 8)
    shared = SharedExpert(projection(2 * INTER, HIDDEN), projection(HIDDEN, INTER), "silu", gate)
    spec = MoeSpec(3, 2, MlpSpec(8))
    moe = MoeWeights(before, projection(3, HIDDEN), ExpertsWeight(3, matrices), spec, shared)
    routed = replace(moe, shared=None)
    both, alone = (REGIONS.experts(REGIONS.begin(x), weights) for weights in (moe, routed))
    y = normed(x, before)
    weight = 1.0 if gate is None else torch.sigmoid(y @ gate)[:, None]
    expected = alone.delta + mlp(y, shared.gate_up, shared.down) * weight
    torch.testing.assert_close(both.delta, expected, atol=1e-4, rtol=1e-5)


def test_regions_are_chosen_once_for_every_class_of_batches() -> None:
    asked: list[BatchClass] = []

    def choose(ops: Ops, layers: Any, batch: BatchClass) -> list[Regions]:
        asked.append(batch)
        return [ComposedRegions(ops, batch.mode).table()] * len(layers)

    ops = replace(OPS, choose_regions=choose)
    feed = GatedMlpWeights(norm(), projection(2 * INTER, HIDDEN), projection(HIDDEN, INTER), "silu")
    layer = LayerWeights(norm(), projection(16, HIDDEN), projection(HIDDEN, 16), None, feed)
    classes = BatchClasses((2, 5, 512))
    tables = choose_regions(ops, [layer, layer], classes)
    assert len(asked) == len(set(asked)) == 4 * 2 * 2 and all(set(table) == set(asked) for table in tables)
    modes: tuple[Mode, ...] = ("eager", "captured")
    for num_rows, span in ((0, (0, 1)), (1, (0, 1)), (2, (2, 4)), (4, (2, 4)), (5, (5, 511)), (511, (5, 511))):
        for mode in modes:
            found = classes.of(num_rows, mode, gathers=True)
            assert (found.min_rows, found.max_rows) == span and found in tables[0]
    assert classes.of(100_000, "eager").min_rows == 512
