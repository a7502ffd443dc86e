"""Rope frequencies against transformers' own functions, for every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokenmill.arch.spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)
from tokenmill.models.rope import make_rope_table, rope_frequencies
from tokenmill.ops.reference import REFERENCE_OPS

THETA, DIM = 500000.0, 64
SHORT, LONG = tuple(1.0 + i / 40 for i in range(32)), tuple(1.5 + i / 3 for i in range(32))
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        Llama3Scaling(8.0, 1.0, 4.0, 8192),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": (
        YarnScaling(4.0, 8192, mscale=1.1386294361119891),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_frequencies_equal_transformers(kind: str) -> None:
    scaling, parameters = CASES[kind]
    config = LlamaConfig(
        hidden_size=DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=32768,
        rope_parameters={**parameters, "rope_theta": THETA},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    spec = RopeSpec(THETA, DIM, scaling)
    torch.testing.assert_close(rope_frequencies(spec, 32768), expected, rtol=1e-6, atol=0.0)
    table = make_rope_table(spec, 64, torch.device("cpu"))
    torch.testing.assert_close(table.cos[0], torch.full((DIM // 2,), float(factor)))


@pytest.mark.parametrize(("served", "factors"), [(4096, SHORT), (4097, LONG)])
def test_longrope_is_settled_by_the_context_served(served: int, factors: tuple[float, ...]) -> None:
    config = Phi3Config(
        hidden_size=DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": list(SHORT),
            "long_factor": list(LONG),
            "original_max_position_embeddings": 4096,
        },
    )
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=served)
    spec = RopeSpec(10000.0, DIM, LongRopeScaling(SHORT, LONG, 4096, factor))
    torch.testing.assert_close(rope_frequencies(spec, served), expected, rtol=1e-6, atol=0.0)
    assert factors != LONG or not torch.allclose(rope_frequencies(spec, 4096), expected)
    table = make_rope_table(spec, 16, torch.device("cpu"))
    torch.testing.assert_close(table.cos[0], torch.full((DIM // 2,), float(factor)))


def test_plain_table_holds_cos_and_sin_of_position_times_frequency() -> None:
    table = make_rope_table(RopeSpec(10000.0, 4), 8, torch.device("cpu"))
    cos, sin = table.at(torch.tensor([7, 2]), REFERENCE_OPS)
    angles = torch.tensor([[7.0, 0.07], [2.0, 0.02]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())
