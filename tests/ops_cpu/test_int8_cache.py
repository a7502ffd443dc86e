"""The native kernels' int8 KV cache: the numbers of the torch reference, and the same bits for a token however the
prompt is cut and whoever else is in the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.native_models import (
    SETS,
    VARIANTS,
    all_logits,
    batch_of,
    native_model,
    random_weights,
    storage_for,
    tokens_for,
    torch_model,
)
from tokenmill.arch.read import read_spec
from tokenmill.models.protocol import WeightReader
from tokenmill.ops.cpu import is_available
from tokenmill.ops.cpu.decoder import NativeDecoder
from tokenmill.weights.source import open_weights

pytestmark = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])

GRID = ("llama", "window", "softcaps", "qk_norm", "sinks", "odd_heads", "many_heads", "no_rope", "large_heads")


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("name", GRID)
def test_every_instruction_set_rounds_as_the_reference_does(name: str, isa: str) -> None:
    """What is left between the two are numbers that lay on the border of a step: far less than the rounding itself."""
    spec = VARIANTS[name]
    weights, tokens, cuts = random_weights(spec), tokens_for(spec, 300), [260, 1, 39]
    exact = all_logits(torch_model(spec, weights), spec, tokens, cuts)
    expected = all_logits(torch_model(spec, weights), spec, tokens, cuts, torch.int8)
    found = all_logits(native_model(spec, weights, isa), spec, tokens, cuts, torch.int8)
    rounding = distance(expected, exact)
    assert 1e-3 < rounding < 0.05
    assert distance(found, expected) < rounding / 4
    assert distance(found, exact) < 1.1 * rounding


def test_keys_and_values_are_rounded_as_the_reference_rounds() -> None:
    """One layer without rope in front of the cache: both round the same vectors."""
    spec = VARIANTS["no_rope"]
    weights, tokens = random_weights(spec), tokens_for(spec, 40)
    caches = [storage_for(spec, 1, torch.int8) for _ in range(2)]
    models = (torch_model(spec, weights), native_model(spec, weights))
    for model, storage in zip(models, caches, strict=True):
        model.forward(batch_of(spec, [(0, tokens, 0)]), storage)
    theirs, ours = (storage.layer(0) for storage in caches)
    blocks, heads, size, dim = ours.keys.shape
    keys = ours.keys.view(torch.uint8).view(blocks, heads, size // 16, dim // 4, 16, 4).permute(0, 1, 2, 4, 3, 5)
    values = ours.values.view(torch.uint8).view(blocks, heads, size // 4, dim, 4).permute(0, 1, 2, 4, 3)
    for found, expected, found_scales, scales in (
        (keys, theirs.keys, ours.key_scales, theirs.key_scales),
        (values, theirs.values, ours.value_scales, theirs.value_scales),
    ):
        assert found_scales is not None and scales is not None
        assert torch.allclose(found_scales, scales, rtol=1e-5)
        written = scales > 0
        steps = found.reshape(blocks, heads, size, dim).int()[written] - 128 - expected.int()[written]
        assert steps.abs().max() <= 1 and steps.ne(0).float().mean() < 1e-3


@pytest.mark.parametrize("name", ["llama", "window", "odd_heads", "softcaps"])
def test_cuts_and_neighbours_change_no_bit(name: str) -> None:
    """A token's own key and value are read rounded also in the step that writes them."""
    spec = VARIANTS[name]
    model = native_model(spec, random_weights(spec, quantised=True))
    tokens = tokens_for(spec, 330)
    whole = all_logits(model, spec, tokens, [330], torch.int8)
    assert torch.equal(all_logits(model, spec, tokens, [100, 1, 29, 199, 1], torch.int8), whole)
    assert torch.equal(all_logits(model, spec, tokens[:40], [1] * 40, torch.int8), whole[:40])
    others = [tokens_for(spec, length, seed) for seed, length in enumerate((5, 31, 1, 64), 1)]
    rows = [others[0], others[1], tokens, *others[2:]]
    storage = storage_for(spec, len(rows), torch.int8)
    together = model.logits(model.forward(batch_of(spec, [(i, row, 0) for i, row in enumerate(rows)]), storage))
    assert torch.equal(together.split([len(row) for row in rows])[2], whole)


def test_what_strangers_left_behind_is_not_seen() -> None:
    """Blocks are used again: scales that are no numbers, past a sequence's end or before its window, change nothing."""
    spec = VARIANTS["window"]
    model = native_model(spec, random_weights(spec))
    tokens = tokens_for(spec, 45)
    clean, dirty = storage_for(spec, 1, torch.int8), storage_for(spec, 1, torch.int8)
    for layer in range(len(spec.layers)):
        cache = dirty.layer(layer)
        for scales in (cache.key_scales, cache.value_scales):
            assert scales is not None
            scales.fill_(float("nan"))
        cache.keys.fill_(77), cache.values.fill_(-3)
    expected, found = (model.forward(batch_of(spec, [(0, tokens, 0)]), storage) for storage in (clean, dirty))
    assert torch.equal(found, expected)


def _logprobs(model: NativeDecoder, spec: object, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    return all_logits(model, spec, tokens, [len(tokens)], dtype).log_softmax(-1)  # type: ignore[arg-type]


def test_smollm2_is_as_sure_of_a_text_as_with_float16(smollm2_path: Path) -> None:
    spec = read_spec(smollm2_path)
    weights: WeightReader = open_weights(smollm2_path, spec)
    model = native_model(spec, weights, activation_bits="16")
    tokens = tokens_for(spec, 96)
    plain, rounded = (_logprobs(model, spec, tokens, dtype) for dtype in (torch.float16, torch.int8))
    divergence = (plain.exp() * (plain - rounded)).sum(-1)
    assert 0 < divergence.mean() < 0.01
