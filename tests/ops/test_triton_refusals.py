"""What the Triton kernels can't do they refuse by name, before anything is loaded and without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.compute_requests import LAYER, SPEC, WANTED
from tokenmill.arch.compressed import Compression
from tokenmill.arch.indexer import BlockIndexer, Indexer
from tokenmill.arch.recurrent import InnerProjection, Recurrent
from tokenmill.arch.spec import Gqa, Mla, MlpSpec, MoeSpec, RopeSpec, RoutingSpec, WindowedMqa
from tokenmill.arch.streams import AltUp, HyperConnections
from tokenmill.engine.backends import TRITON

pytest.importorskip("triton")

MAMBA = Recurrent("ssd", 1, 2, 24, 128, 4, None)
PURE = Recurrent("ssd", 1, 2, 64, 64, 4, None)
SCALED = Recurrent("delta", 2, 2, 64, 64, 4, None, strength_scale=2.0)
LIMITED = Recurrent("delta", 2, 2, 64, 64, 4, None, has_channel_decays=True, lowest_decay=-5.0)
SCAN = Recurrent("scan", 1, 1, 16, 128, 4, None, inner=InnerProjection(8))
INDEXED = Mla(4, 32, 64, 16, 8, 16, 1.0, None, indexer=Indexer(2, 24, 8))
WINDOWED = WindowedMqa(4, 1024, 8, 16, 1.0, RopeSpec(1e4, 8), 2, 16, 1e-6, Compression(4, True, Indexer(2, 24, 8)))
BLOCKS = Gqa(4, 2, 64, 1.0, None, block_indexer=BlockIndexer(2, 24, 16, 3))
LOOKED_UP = MoeSpec(4, 2, MlpSpec(8, "silu_to_10"), RoutingSpec("sqrt_softplus", table_rows=80))
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
        ({"dtype": "int8"}, "activations in int8"),
        ({"kv_dtype": "float8_e5m2"}, "a KV cache in float8_e5m2"),
        ({"deterministic": True, "quantization": "fp8"}, "quantised weights"),
        (
            {"spec": replace(SPEC, layers=(replace(LAYER, mixer=Gqa(64, 2, 64, 1.0, None)),))},
            "query heads",
        ),
        (
            {"spec": replace(SPEC, layers=(replace(LAYER, mixer=Gqa(4, 2, 64, 1.0, None, value_dim=32)),))},
            "another width",
        ),
        ({"spec": replace(SPEC, layers=(replace(LAYER, mlp=MlpSpec(8, "clamped_silu_7")),))}, "limited after"),
        ({"spec": replace(SPEC, layers=(replace(LAYER, mixer=BLOCKS),))}, "selected blocks"),
        (
            {"spec": replace(SPEC, layers=(replace(LAYER, mixer=Gqa(2, 2, 64, 1.0, None, slopes=(0.5, 0.2))),))},
            "ALiBi",
        ),
        ({"spec": replace(SPEC, layers=(replace(LAYER, mixer=MAMBA),))}, "keys of 24 dimensions"),
        (
            {"spec": replace(SPEC, layers=(replace(LAYER, side_mixer=replace(MAMBA, key_dim=256)),))},
            "states of 256 x 128",
        ),
        ({"spec": replace(SPEC, layers=(replace(LAYER, mixer=SCALED),))}, "scaled strengths"),
        ({"spec": replace(SPEC, layers=(replace(LAYER, mixer=LIMITED),))}, "lowest decay"),
        ({"spec": replace(SPEC, layers=(replace(LAYER, mixer=SCAN, mlp=None),))}, "Mamba-1"),
        ({"spec": replace(SPEC, layers=(replace(LAYER, mixer=PURE, mlp=None),))}, "recurrent layers alone"),
        ({"spec": replace(SPEC, layers=(replace(LAYER, mixer=INDEXED),)), "deterministic": True}, "an indexer"),
        ({"spec": replace(SPEC, layers=(replace(LAYER, mixer=WINDOWED),))}, "heads of 1024 dimensions"),
        ({"spec": replace(SPEC, layers=(replace(LAYER, mixer=replace(WINDOWED, head_dim=33)),))}, "heads of 33"),
    ],
)
def test_anything_else_is_refused_with_its_reason(changes: dict[str, object], reason: str) -> None:
    refusal = TRITON.unsupported_reason(replace(WANTED, **changes))  # type: ignore[arg-type]
    assert refusal is not None and reason in refusal


def test_newer_families_are_computed() -> None:
    """Entries that an indexer chooses, experts without gates or looked up by token, GGUF's order of heads, compressed
    entries and several residual streams"""
    ungated = replace(LAYER, mlp=MoeSpec(4, 2, MlpSpec(8, "relu2", is_gated=False)))
    tiled = replace(LAYER, mixer=replace(MAMBA, key_dim=128, key_heads=2, value_heads=4, is_tiled=True))
    streamed, connected = replace(LAYER, streams=AltUp(2, 4)), replace(LAYER, streams=HyperConnections(2, 4))
    compressed = replace(connected, mixer=replace(WINDOWED, head_dim=512), mlp=LOOKED_UP)
    for layer in (replace(LAYER, mixer=INDEXED), ungated, tiled, streamed, compressed):
        assert TRITON.unsupported_reason(replace(WANTED, spec=replace(SPEC, layers=(layer, LAYER)))) is None
