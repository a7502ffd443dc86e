"""What the Triton kernels can't do they refuse by name, before anything is loaded and without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.compute_requests import LAYER, SPEC, WANTED
from tokenmill.arch.indexer import Indexer
from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.spec import Gqa, Mla, MlpSpec, MoeSpec
from tokenmill.arch.streams import AltUp, HyperConnections
from tokenmill.engine.backends import TRITON

pytest.importorskip("triton")

MAMBA = Recurrent("ssd", 1, 2, 24, 128, 4, None)
INDEXED = Mla(4, 32, 64, 16, 8, 16, 1.0, None, indexer=Indexer(2, 24, 8))
GATED = replace(LAYER, mlp=MoeSpec(4, 2, MlpSpec(8), shared=MlpSpec(8), has_shared_gate=True))


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8", "fp8"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_cache_and_the_deterministic_mode_are_taken(kv_dtype: str, deterministic: bool) -> None:
    assert TRITON.unsupported_reason(replace(WANTED, kv_dtype=kv_dtype, deterministic=deterministic)) is None


def test_a_gate_of_experts_for_all_tokens_is_deterministic() -> None:
    assert TRITON.unsupported_reason(replace(WANTED, deterministic=True, spec=replace(SPEC, layers=(GATED,)))) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "on a GPU"),
        ({"dtype": "int8"}, "for activations"),
        ({"kv_dtype": "float8_e5m2"}, "for the KV cache"),
        ({"deterministic": True, "quantization": "fp8"}, "quantised weights"),
        (
            {"spec": replace(SPEC, layers=(replace(LAYER, mixer=Gqa(64, 2, 64, 1.0, None)),))},
            "query heads",
        ),
        ({"spec": replace(SPEC, layers=(replace(LAYER, mixer=MAMBA),))}, "keys of 24 dimensions"),
        (
            {"spec": replace(SPEC, layers=(replace(LAYER, side_mixer=replace(MAMBA, key_dim=256)),))},
            "states of 256 x 128",
        ),
        ({"spec": replace(SPEC, layers=(replace(LAYER, mixer=INDEXED),)), "deterministic": True}, "an indexer chooses"),
        ({"spec": replace(SPEC, layers=(replace(LAYER, streams=HyperConnections(2, 4)),))}, "several residual"),
    ],
)
def test_anything_else_is_refused_with_its_reason(changes: dict[str, object], reason: str) -> None:
    refusal = TRITON.unsupported_reason(replace(WANTED, **changes))  # type: ignore[arg-type]
    assert refusal is not None and reason in refusal


def test_newer_families_are_computed() -> None:
    """Entries that an indexer chooses, experts without gates and GGUF's order of heads"""
    ungated = replace(LAYER, mlp=MoeSpec(4, 2, MlpSpec(8, "relu2", is_gated=False)))
    tiled = replace(LAYER, mixer=replace(MAMBA, key_dim=128, key_heads=2, value_heads=4, is_tiled=True))
    streamed = replace(LAYER, streams=AltUp(2, 4))
    for layer in (replace(LAYER, mixer=INDEXED), ungated, tiled, streamed):
        assert TRITON.unsupported_reason(replace(WANTED, spec=replace(SPEC, layers=(layer,)))) is None
