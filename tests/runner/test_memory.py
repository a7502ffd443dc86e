"""How many blocks a share of memory holds."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tokenmill.arch.cache_parts import CacheField
from tokenmill.arch.packed_formats import EXPANDED_BYTES, StoredFormat
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from tokenmill.arch.tensors import tensors_of
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import CacheGroup, KVLayout
from tokenmill.runner.memory import (
    GRAPH_BYTES,
    MAX_HOST_LOGITS,
    WORKSPACE_BYTES,
    RunnerLimits,
    blocks_for_context,
    gpu_weight_parts,
    mixed_step_bytes,
    num_blocks_that_fit,
    runner_bytes,
)

FIELDS = CacheField("keys", (2, 8), "float32"), CacheField("values", (2, 8), "float32")
PLAIN = KVLayout((CacheGroup(FIELDS, None, (0, 1)),))
MIXED = KVLayout((CacheGroup(FIELDS, None, (1,)), CacheGroup(FIELDS, 32, (0,))))
BLOCK_BYTES = 2 * 2 * 2 * 16 * 8 * 4  # K and V, layers, heads, tokens, dims, float32


def fit(free_bytes: int, max_context: int = 64, max_rows: int = 1000) -> int:
    return num_blocks_that_fit(
        PLAIN,
        free_bytes=free_bytes,
        memory_fraction=0.5,
        block_size=16,
        block_bytes=BLOCK_BYTES,
        max_context=max_context,
        max_rows=max_rows,
        max_chunk=8,
    )


def test_blocks_fill_the_share() -> None:
    assert fit(2 * 100 * BLOCK_BYTES) == 100
    assert fit(2 * 101 * BLOCK_BYTES - 1) == 100


def test_no_more_than_the_rows_can_use() -> None:
    assert fit(2 * 100 * BLOCK_BYTES, max_rows=3) == 3 * 4 + 1


def test_no_room_at_all_is_said_at_load() -> None:
    assert fit(2 * 2 * BLOCK_BYTES) == 2
    with pytest.raises(InvalidConfig, match="no room for a KV cache") as caught:
        fit(2 * 2 * BLOCK_BYTES - 1)
    assert caught.value.param == "memory_fraction"


def touched_blocks(oldest: int, newest: int) -> int:
    return newest // 16 - oldest // 16 + 1


@pytest.mark.parametrize("max_chunk", [1, 2, 16, 17, 40])
def test_a_window_group_holds_what_a_chunk_sees(max_chunk: int) -> None:
    """The worst place in a block that a chunk can begin at, found by trying all."""
    worst = max(touched_blocks(first - 31, first + max_chunk - 1) for first in range(160, 176))
    found = blocks_for_context(MIXED, 1600, block_size=16, max_chunk=max_chunk)
    assert 100 + worst <= found <= 100 + worst + 1


def test_a_short_context_fills_no_window() -> None:
    assert blocks_for_context(MIXED, 16, block_size=16, max_chunk=512) == 2


LLAMA = ModelSpec(
    "llama",
    128_256,
    4096,
    (LayerSpec(Gqa(32, 8, 128, 0.088, RopeSpec(500_000.0, 128)), MlpSpec(14_336)),) * 32,
    1e-5,
    131_072,
    tied_head=False,
    dtype="bfloat16",
)


def test_an_8b_model_s_largest_step_on_a_gpu() -> None:
    found = runner_bytes(LLAMA, RunnerLimits(max_running=1024, token_budget=8192, max_context=8192))
    logits = 1024 * 128_256
    widest = max(8192 * (5 * 4096 + 3 * 14_336) * 2, logits * 6 + MAX_HOST_LOGITS * 40)
    in_flight = 8192 * 4096 * 2  # states that the host has not looked at when the next step is launched
    splits = 68_000 * 129 * 4  # what programs leave that share the context of a short chunk
    assert found.step == widest + in_flight + splits + WORKSPACE_BYTES
    assert found.rows == pytest.approx(1024 * (2 * 128_256 + 513 * 4), rel=0.05)
    assert found.graphs > logits * 6
    halved = runner_bytes(LLAMA, RunnerLimits(512, 4096, 8192))
    assert found.total > 1.4 * halved.total
    alone = runner_bytes(LLAMA, RunnerLimits(1, 512, 8192)).step
    assert alone > 130 * 128_256 * 16, "a prompt may be scored, whoever is alone with it"


def test_steps_of_chunks_beside_answers_are_planned_where_they_are_captured() -> None:
    limits = RunnerLimits(max_running=64, token_budget=8192, max_context=8192)
    found = runner_bytes(LLAMA, limits)
    with patch("tokenmill.runner.memory.can_mix", lambda spec: False):
        without, rank = runner_bytes(LLAMA, limits), runner_bytes(LLAMA, limits, share=0.5)
    assert (found.rows, found.step) == (without.rows, without.step)
    num_tokens, num_graphs = 64 + 768, 4 * 11 + 8
    assert mixed_step_bytes(LLAMA, limits) > num_tokens * (5 * 4096 + 3 * 14_336) * 2
    room = mixed_step_bytes(LLAMA, limits) - 64 * 128_256 * 6  # or of the logits of decoding rows, whichever is more
    assert room < found.graphs - without.graphs - num_graphs * GRAPH_BYTES < room + (16 << 20), "and hidden states"
    assert runner_bytes(LLAMA, limits, share=0.5) == rank, "those of several ranks are not captured"


@pytest.mark.parametrize(("quantization", "gb"), [("none", 16.06), ("fp8", 9.08), ("int8", 9.52), ("int4", 5.81)])
def test_weights_as_the_gpu_keeps_them(quantization: str, gb: float) -> None:
    assert gpu_weight_parts(LLAMA, 2, quantization).total / 1e9 == pytest.approx(gb, rel=0.01)
    parts = gpu_weight_parts(LLAMA, 2, quantization)
    assert parts.embedding == 2 * 128_256 * 4096 and parts.experts == 0 and parts.rest > 4e9


def test_a_quantised_file_s_weights_and_what_large_steps_expand() -> None:
    stored = {name: StoredFormat("Q4_K") for name, tensor in tensors_of(LLAMA).items() if tensor.kind != "vector"}
    parts = gpu_weight_parts(LLAMA, 2, stored=stored)
    assert parts.embedding == 128_256 * 4096 * 5 // 8
    assert parts.total == pytest.approx(8.03e9 * 5 / 8, rel=0.01)
    assert gpu_weight_parts(LLAMA, 2, "fp8", stored).total == parts.total, "what is quantised is not rounded again"
    plain, words = (runner_bytes(LLAMA, RunnerLimits(64, 512, 8192, expands_weights=has)) for has in (False, True))
    assert words.step - plain.step == words.graphs - plain.graphs == EXPANDED_BYTES
