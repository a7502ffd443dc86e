"""Adapters of experts by Triton kernels in the interpreter: the sums of the reference, for any mix of adapters"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.adapted_models import adaptable_model
from tests.support.peft_cases import OF_EXPERTS, error_of_logits, model_folder
from tests.support.triton_inputs import assert_near
from tokenmill.arch.spec import Activation
from tokenmill.lora.sizes import slot_values
from tokenmill.models.linear import ExpertSlots
from tokenmill.ops.interface import ExpertsWeight, Routing
from tokenmill.ops.low_rank import ExpertsShape, LowRank
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.ops.reference.low_rank import ReferenceLowRankOps
from tokenmill.ops.triton.adapters.ops import TritonLowRankOps
from tokenmill.ops.triton.adapters.token_slots import MAX_SINGLE
from tokenmill.ops.triton.build import build_ops
from tokenmill.weights.dequantize import dequantize

HIDDEN, INTER, EXPERTS, ACTIVE = 40, 24, 5, 2
Parts = tuple[LowRank | None, LowRank | None, LowRank | None]


def low_rank(rows: int, columns: int, rank: int, *, has_gain: bool = False) -> LowRank:
    gain = torch.randn(rows) * 0.1 if has_gain else None
    return LowRank(torch.randn(rank, columns) * 0.3, torch.randn(rows, rank) * 0.3, gain)


def adapter(rank: int, *, is_gated: bool, has_gain: bool = False) -> list[Parts]:
    """Return an adapter of all matrices of most experts; one expert has only an adapted down projection, one has
    none."""
    made: list[Parts] = [
        (
            low_rank(INTER, HIDDEN, rank, has_gain=has_gain) if is_gated else None,
            low_rank(INTER, HIDDEN, max(1, rank - 3)),
            low_rank(HIDDEN, INTER, rank, has_gain=has_gain),
        )
        for _ in range(EXPERTS - 2)
    ]
    return [*made, (None, None, low_rank(HIDDEN, INTER, rank)), (None, None, None)]


def experts_weight(*, has_bias: bool, is_gated: bool) -> ExpertsWeight:
    ups, downs = torch.randn(EXPERTS, INTER, HIDDEN) * 0.2, torch.randn(EXPERTS, HIDDEN, INTER) * 0.2
    inner = torch.cat((torch.randn(EXPERTS, INTER, HIDDEN) * 0.2, ups), dim=1) if is_gated else ups
    weight = ExpertsWeight(EXPERTS, (inner, downs), is_gated)
    if not has_bias:
        return weight
    return replace(weight, gate_up_bias=torch.randn(EXPERTS, inner.shape[1]), down_bias=torch.randn(EXPERTS, HIDDEN))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_tokens", [7, MAX_SINGLE + 9])
@pytest.mark.parametrize(
    ("activation", "has_bias", "has_gain"), [("silu", False, False), ("swiglu_oai", True, False), ("silu", False, True)]
)
def test_experts_of_any_mix_of_adapters(
    num_tokens: int, deterministic: bool, activation: Activation, has_bias: bool, has_gain: bool
) -> None:
    compare(num_tokens, activation, deterministic=deterministic, has_bias=has_bias, has_gain=has_gain)


@pytest.mark.parametrize("num_tokens", [7, MAX_SINGLE + 9])
def test_experts_without_gates(num_tokens: int) -> None:
    compare(num_tokens, "relu2", is_gated=False, has_bias=True)


def compare(
    num_tokens: int,
    activation: Activation,
    *,
    deterministic: bool = False,
    has_bias: bool = False,
    has_gain: bool = False,
    is_gated: bool = True,
) -> None:
    packed = experts_weight(has_bias=has_bias, is_gated=is_gated)
    adapters = [
        adapter(20, is_gated=is_gated), adapter(5, is_gated=is_gated, has_gain=has_gain), [(None, None, None)] * EXPERTS
    ]  # fmt: skip
    slots, x = torch.randint(0, 4, (num_tokens,), dtype=torch.int32), torch.randn(num_tokens, HIDDEN)
    weights, ids = REFERENCE_OPS.route(torch.randn(num_tokens, EXPERTS), Routing(ACTIVE))
    shape, results = ExpertsShape(EXPERTS, HIDDEN, INTER, is_gated), []
    for ops in (ReferenceLowRankOps(), TritonLowRankOps(deterministic=deterministic)):
        held = ops.hold_experts(shape, 3, 20, x[:0])
        assert held is not None
        changed = [held.put(slot, parts) for slot, parts in enumerate(adapters, start=1)]
        results.append(held.run(x, weights, ids, packed, activation, ops.plan(slots)))
    assert changed == [True, has_gain, False], "graphs are captured anew when there are other kernels"
    assert_near(results[1], results[0], 1e-4)
    assert held.put(1, adapters[2]) is False
    found = held.run(x, weights, ids, packed, activation, ops.plan(slots))
    plain = REFERENCE_OPS.experts(x, weights, ids, packed, activation)
    assert_near(found[slots == 1], plain[slots == 1], 1e-4)
    assert_near(found[slots == 2], results[0][slots == 2], 1e-4)


def test_room_is_only_made_where_an_adapter_of_experts_is_named() -> None:
    shape = ExpertsShape(EXPERTS, HIDDEN, INTER, is_gated=True)
    assert TritonLowRankOps().hold_experts(shape, 3, 0, torch.empty(0)) is None


def test_nothing_is_launched_for_adapters_of_other_matrices() -> None:
    ops, packed = TritonLowRankOps(), experts_weight(has_bias=False, is_gated=True)
    held = ops.hold_experts(ExpertsShape(EXPERTS, HIDDEN, INTER, is_gated=True), 1, 16, torch.empty(0))
    assert held is not None and not held.put(1, [(None, None, None)] * EXPERTS)
    x, chosen = torch.randn(3, HIDDEN), REFERENCE_OPS.route(torch.randn(3, EXPERTS), Routing(ACTIVE))
    found = held.run(x, *chosen, packed, "silu", ops.plan(torch.ones(3, dtype=torch.int32)))
    assert torch.equal(found, build_ops().experts(x, *chosen, packed, "silu"))


def test_an_mlp_of_all_tokens_that_became_two_more_experts() -> None:
    """The adapter of the MLP is divided between the two experts."""
    ops, shared, routed = TritonLowRankOps(), 2, 3
    shapes = {"gate": (routed, INTER, HIDDEN), "up": (routed, INTER, HIDDEN), "down": (routed, HIDDEN, INTER)}
    raws = [RawTensor(name, shape, torch.randn(shape) * 0.2) for name, shape in shapes.items()]
    wide = [(shared * INTER, HIDDEN), (shared * INTER, HIDDEN), (HIDDEN, shared * INTER)]
    mlp = [RawTensor("shared", shape, torch.randn(shape) * 0.2) for shape in wide]
    packed = build_ops().pack_experts(raws[0], raws[1], raws[2], dequantize, (mlp[0], mlp[1], mlp[2]))
    assert packed.num_shared == shared
    held = ops.hold_experts(ExpertsShape(routed + shared, HIDDEN, INTER, is_gated=True), 1, 16, torch.empty(0))
    assert held is not None
    slots = ExpertSlots(("g", "u", "d"), routed, held, ("sg", "su", "sd"), shared)
    assert slots.matrices() == {"sg", "su", "sd"} | {f"{name}.{number}" for name in "gud" for number in range(routed)}
    parts = {
        name: low_rank(*shape, 4, has_gain=name != "su") for name, shape in zip(("sg", "su", "sd"), wide, strict=True)
    }
    assert slots.put(1, parts)
    x = torch.randn(6, HIDDEN)
    weights, ids = build_ops().route(torch.randn(6, routed), Routing(1, num_shared=shared))
    found = held.run(x, weights, ids, packed, "silu", ops.plan(torch.ones(6, dtype=torch.int32)))
    expected = REFERENCE_OPS.experts(
        x, weights[:, :1], ids[:, :1], REFERENCE_OPS.pack_experts(*raws, dequantize), "silu"
    )

    def adapted(number: int, name: str, x: torch.Tensor) -> torch.Tensor:
        part, out = parts[name], x @ mlp[number].data.T
        return out + (0.0 if part.gain is None else out * part.gain) + x @ part.a.T @ part.b.T

    gate_up = torch.cat((adapted(0, "sg", x), adapted(1, "su", x)), dim=1)
    assert_near(found, expected + adapted(2, "sd", REFERENCE_OPS.act_mul(gate_up, "silu")), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("title", OF_EXPERTS)
def test_logits_are_those_of_peft(title: str, shared_dir: Path, tmp_path: Path) -> None:
    """Beside a row without an adapter, whole models"""
    loaded = adaptable_model(model_folder(shared_dir, title), "ops", 2, ops=build_ops(), max_rank=16, expert_rank=4)
    assert error_of_logits(title, loaded, tmp_path) < 2e-4


def test_what_is_planned_for_slots_is_what_they_take(shared_dir: Path) -> None:
    loaded = adaptable_model(model_folder(shared_dir, OF_EXPERTS[0]), "ops", 3, build_ops(), max_rank=8, expert_rank=4)
    slots = loaded.model.adapter_slots
    assert slots.held_experts
    held = [one.slots for one in slots.held] + [one.held for one in slots.held_experts]
    assert sum(one.num_values for one in held) == 3 * slot_values(loaded.spec, 8, 4)
