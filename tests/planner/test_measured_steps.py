"""Planned decode steps of a GPU against the steps that were measured on an H200 (`benchmarks/results`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.planner.device import plan_device
from tokenmill.planner.memory import Split
from tokenmill.planner.model import find_model
from tokenmill.planner.roofline import Roofline, Speeds

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
CONTEXT = 512
# Shape, type of its weights, milliseconds of a step by number of sequences. Only steps whose rows had different tokens,
# so that they read the experts that a batch reads.
MEASURED = [
    ("llama-8b", "bfloat16", {1: 3.97, 8: 4.41, 32: 5.0, 128: 7.25}),
    ("llama-8b", "fp8", {1: 2.77, 8: 3.07, 32: 3.63, 128: 5.45}),
    ("llama-8b", "int4", {1: 2.11, 8: 2.88, 32: 3.93, 128: 7.58}),
    ("qwen3-30b-a3b", "bfloat16", {1: 2.17}),
    ("deepseek-v2-lite", "bfloat16", {1: 1.68}),
    ("qwen3.5-35b-a3b", "bfloat16", {1: 4.28, 8: 8.49, 32: 16.02, 128: 28.33}),
]


@pytest.mark.parametrize(("shape", "dtype", "steps"), MEASURED)
def test_planned_steps_are_near_measured_ones(shape: str, dtype: str, steps: dict[int, float]) -> None:
    device, model = plan_device("H200"), find_model(str(SHAPES / shape))
    speeds = Speeds.of_device(device, dtype)
    roofline = Roofline(model.spec, model.weights(dtype), "bfloat16", device, Split(), speeds)
    for batch, measured_ms in steps.items():
        assert roofline.decode_s(batch, CONTEXT) * 1e3 == pytest.approx(measured_ms, rel=0.2), f"{batch} sequences"


# One rank of eight of a 70B model, without the exchanges (`benchmarks/gpu_rank_alone.py`): rows, mean context and ms.
RANK_STEPS = [(8, 1066, 6.11), (32, 1072, 7.53), (128, 1096, 9.64)]


@pytest.mark.parametrize(("batch", "context", "measured_ms"), RANK_STEPS)
def test_planned_steps_of_a_rank_are_within_a_tenth_of_measured_ones(
    batch: int, context: int, measured_ms: float
) -> None:
    device, model = plan_device("H200"), find_model(str(SHAPES / "llama-70b"))
    speeds = Speeds.of_device(device, "bfloat16")
    roofline = Roofline(model.spec, model.weights("bfloat16"), "bfloat16", device, Split(8), speeds)
    planned_s = roofline.decode_s(batch, context) * (1.0 - roofline.exchange_share(batch, context))
    assert planned_s * 1e3 == pytest.approx(measured_ms, rel=0.1)
