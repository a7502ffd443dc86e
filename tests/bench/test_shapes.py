"""The configs that benchmarks run from: what the tables call Llama-3.1-8B and so on is of that size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.arch.cost import num_parameters
from tokenmill.arch.read import read_spec

SHAPES = Path(__file__).resolve().parents[2] / "benchmarks" / "shapes"


BILLIONS = {
    "deepseek-v2-lite": 15.71,
    "deepseek-v4-flash-6": 40.58,  # six of its layers
    "glm-4.7-flash": 29.94,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "kimi-linear-48b-a3b": 49.47,
    "llama-1b": 1.24,
    "llama-8b": 8.03,
    "llama-70b": 70.55,
    "qwen3-30b-a3b": 30.53,
    "qwen3.5-35b-a3b": 34.66,
    "smollm2-135m": 0.1345,
}


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_shapes_are_what_they_are_called(name: str, billions: float) -> None:
    assert num_parameters(read_spec(SHAPES / name)) / 1e9 == pytest.approx(billions, rel=0.005)


def test_every_shape_is_checked() -> None:
    assert sorted(path.name for path in SHAPES.iterdir()) == sorted(BILLIONS)
