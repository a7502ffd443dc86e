"""The native decoder computes the same function as the torch one, for everything a ModelSpec can say; and a token's
logits keep their bits however the prompt is cut and whoever else is in the batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.native_models import (
    BLOCK,
    CPU,
    LLAMA,
    MAX_CONTEXT,
    SETS,
    VARIANTS,
    _group,
    all_logits,
    batch_of,
    layout_of,
    native_model,
    random_weights,
    storage_for,
    tokens_for,
    torch_model,
    with_attention,
)
from tokenmill.arch.gguf_file import read_gguf_model
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec, RopeSpec
from tokenmill.engine.backends import NATIVE
from tokenmill.kv.layout import KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.models.rope import make_rope_table
from tokenmill.ops.batch import DrawParams, ForwardBatch, GroupTables, StepRows
from tokenmill.ops.compute_request import ComputeRequest
from tokenmill.ops.cpu import is_available
from tokenmill.ops.cpu.availability import native
from tokenmill.ops.cpu.decoder import NativeDecoder
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.source import open_weights

pytestmark = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_equals_the_torch_model(name: str) -> None:
    spec = VARIANTS[name]
    weights = random_weights(spec)
    tokens = tokens_for(spec, 50)
    expected = all_logits(torch_model(spec, weights), spec, tokens, [33, 17])
    found = all_logits(native_model(spec, weights), spec, tokens, [33, 17])
    assert torch.allclose(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize(
    "name",
    [
        "window",
        "conv",
        "conv_odd",
        "large_heads",
        "narrow_values",
        "clamped",
        "shared_index",
        "blocks",
        "altup",
        "compressed_odd",
    ],
)
def test_every_instruction_set_computes_the_same_model(name: str, isa: str) -> None:
    spec = VARIANTS[name]
    weights = random_weights(spec)
    tokens = tokens_for(spec, 40)
    expected = all_logits(torch_model(spec, weights), spec, tokens, [40])
    assert torch.allclose(all_logits(native_model(spec, weights, isa), spec, tokens, [40]), expected, atol=2e-4)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("name", ["llama", "post_norms", "experts", "odd_heads", "conv"])
def test_sixteen_bits_leave_quantised_models_as_they_are(name: str, isa: str) -> None:
    """Weights of 8 bits, activations of 16: what remains of rounding is a hundredth of what 8 bits leave."""
    spec = VARIANTS[name]
    weights = random_weights(spec, quantised=True)
    tokens = tokens_for(spec, 40)
    expected = all_logits(torch_model(spec, weights), spec, tokens, [40])
    models = (native_model(spec, weights, isa, activation_bits=bits) for bits in ("8", "16"))
    coarse, fine = ((all_logits(model, spec, tokens, [40]) - expected).norm() / expected.norm() for model in models)
    assert fine < 2e-4
    assert fine < coarse / 20


@pytest.mark.parametrize(("quantised", "bits"), [(False, "8"), (True, "8"), (True, "mixed"), (True, "16")])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "window",
        "experts",
        "sinks",
        "conv",
        "large_heads",
        "narrow_values",
        "shared_index",
        "blocks",
        "altup",
        "compressed",
    ],
)
def test_cutting_the_prompt_changes_no_bit(name: str, quantised: bool, bits: str) -> None:
    spec = VARIANTS[name]
    model = native_model(spec, random_weights(spec, quantised), activation_bits=bits)
    tokens, dtype = tokens_for(spec, 330), torch.float16 if quantised else torch.float32
    whole = all_logits(model, spec, tokens, [330], dtype)
    assert torch.equal(all_logits(model, spec, tokens, [100, 1, 29, 199, 1], dtype), whole)
    assert torch.equal(all_logits(model, spec, tokens[:40], [1] * 40, dtype), whole[:40])


@pytest.mark.parametrize(("bits", "dtype"), [("8", torch.float32), ("mixed", torch.float16), ("16", torch.bfloat16)])
@pytest.mark.parametrize(
    "name", ["llama", "conv", "large_heads", "narrow_values", "sparse", "blocks", "altup", "compressed"]
)
def test_neighbours_change_no_bit(name: str, bits: str, dtype: torch.dtype) -> None:
    """With numbers of two bytes, tiles of a prompt share the keys that one of them turned to floats."""
    spec = VARIANTS[name]
    model = native_model(spec, random_weights(spec, quantised=True), activation_bits=bits)
    rows = [tokens_for(spec, length, seed) for seed, length in enumerate((5, 331, 1, 64, 17, 270))]
    alone = [all_logits(model, spec, tokens, [len(tokens)], dtype) for tokens in rows]
    storage = storage_for(spec, len(rows), dtype)
    batch = batch_of(spec, [(i, row, 0) for i, row in enumerate(rows)], dtype)
    together = model.logits(model.forward(batch, storage))
    for expected, found in zip(alone, together.split([len(row) for row in rows]), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("wanted", [[4, 35, 36, 100], [36, 2, 70], [0], []])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "window",
        "post_norms",
        "experts",
        "odd_heads",
        "many_heads",
        "conv_last",
        "conv_odd",
        "large_heads",
        "sparse",
        "shared_index",
        "altup",
        "compressed",
        "compressed_odd",
    ],
)
def test_tokens_without_logits_change_no_bit(name: str, wanted: list[int]) -> None:
    """The last layer computes only the wanted tokens, in any order; the cache holds what it would hold anyway."""
    spec = VARIANTS[name]
    model = native_model(spec, random_weights(spec, quantised=True))
    rows = [tokens_for(spec, length, seed) for seed, length in enumerate((5, 31, 1, 64))]
    batch = batch_of(spec, [(i, row, 0) for i, row in enumerate(rows)])
    after = batch_of(spec, [(i, [3], len(row)) for i, row in enumerate(rows)])
    full, narrow = storage_for(spec, len(rows)), storage_for(spec, len(rows))
    expected = model.logits(model.forward(batch, full))
    expected_after = model.logits(model.forward(after, full))
    found = model.logits(model.forward(replace(batch, logit_rows=torch.tensor(wanted, dtype=torch.int64)), narrow))
    assert torch.equal(found, expected[wanted])
    assert torch.equal(model.logits(model.forward(after, narrow)), expected_after)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_the_best_logits_are_the_first_highest_of_all(cap: float | None, quantised: bool, isa: str) -> None:
    """Every token has a twin far behind it, and under a low cap more of them are equal."""
    spec = replace(LLAMA, vocab_size=1003, logit_softcap=cap)
    weights = random_weights(spec, quantised)
    head = weights.tensors["embed.weight"].data
    head[501:1002] = head[:501].clone()
    model = native_model(spec, weights, isa, threads=3)
    hidden = torch.randn(17, spec.hidden_size, generator=torch.Generator().manual_seed(4))
    hidden[5], hidden[6, 3] = 0.0, torch.nan
    logits = model.logits(hidden)
    places, values = model.best_logits(hidden)
    assert torch.equal(places, torch.from_numpy(logits.numpy().argmax(-1)).where(~logits.isnan().any(-1), places))
    assert values.isnan().tolist() == logits.isnan().any(-1).tolist()
    assert torch.equal(values[~values.isnan()], logits.amax(-1)[~values.isnan()])


def step_rows(spec: ModelSpec, rows: list[tuple[int, list[int], int]], wanted: list[int]) -> StepRows:
    """The rows of `batch_of`, among eight that have tables."""
    layout = layout_of(spec)
    every_row: list[tuple[int, list[int], int]] = [(row, [], 0) for row in range(8)]
    groups = range(len(layout.groups))
    tables = np.stack([_group(every_row, group, layout).block_tables.numpy() for group in groups])
    numbers, tokens, starts = zip(*rows, strict=True)
    return StepRows(list(numbers), list(starts), list(tokens), wanted, tables, BLOCK)


@pytest.mark.parametrize("name", ["window", "conv"])
def test_rows_as_lists_are_the_same_batch(name: str) -> None:
    """A chunk that draws nothing, a row that goes on in it, a draft, a row that ends a block; several cache groups."""
    spec = VARIANTS[name]
    model, tokens = native_model(spec, random_weights(spec)), tokens_for(spec, 60)
    prompts = [(5, tokens[:33], 0), (0, tokens[20:51], 0), (2, tokens[7:47], 0)]
    going_on = [(0, tokens[51:52], 31), (5, tokens[33:36], 33), (7, tokens[:20], 0), (2, tokens[47:60], 40)]
    wanted = [1, 3, 0, 1]
    by_tensors, by_lists = storage_for(spec, 8), storage_for(spec, 8)
    model.forward(batch_of(spec, prompts), by_tensors)
    assert model.greedy_next(step_rows(spec, prompts, [0, 0, 0]), by_lists) == []
    ends = np.cumsum([len(fed) for _, fed, _ in going_on])
    lines = [end - back for end, num in zip(ends, wanted, strict=True) for back in range(num, 0, -1)]
    expected = model.logits(model.forward(batch_of(spec, going_on), by_tensors))[lines]
    rows = step_rows(spec, going_on, wanted)
    assert torch.equal(model.logits_next(rows, by_lists), expected)
    assert model.greedy_next(rows, by_lists) == expected.argmax(-1).tolist()
    params = DrawParams([0.7, 0.0, 2.0, 0.0, 0.0], [0, 9, 0, 0, 0], [1.0, 1.0, 0.6, 1.0, 1.0], [0.0] * 5, [0.9] * 5, [])
    with pytest.raises(ValueError, match="parameters"):
        model.draw_next(rows, params, by_lists)
    params = params._replace(is_greedy=[False, False, False, False, True])
    drawn = model.draw_next(rows, params, by_lists)
    assert drawn == native().draw_rows(expected, list(range(5)), *params) and drawn[4] == expected[4].argmax()
    assert drawn != model.greedy_next(rows, by_lists)
    many, params = (
        step_rows(spec, [(3, tokens_for(spec, 70, seed=1), 0)], [70]),
        DrawParams([0.7] * 70, [9] * 70, [1.0] * 70, [0.0] * 70, [line / 70 for line in range(70)], [False] * 70),
    )
    drawn = model.draw_next(many, params, by_lists)  # more lines than are held in memory at once
    assert drawn == native().draw_rows(model.logits_next(many, by_lists), list(range(70)), *params)
    for wrong in ({"starts": [1]}, {"rows": [0, 1, 2, 8]}, {"starts": [31, 33, 0, 380]}, {"num_outputs": [2, 0, 0, 0]}):
        with pytest.raises(ValueError, match="row"):
            model.greedy_next(rows._replace(**wrong), by_lists)


def test_one_logit_that_is_no_number_is_told() -> None:
    weights = random_weights(LLAMA)
    weights.tensors["embed.weight"].data[70, 5] = torch.nan
    model = native_model(LLAMA, weights)
    assert model.best_logits(torch.ones(2, LLAMA.hidden_size))[1].isnan().all()
    rows = step_rows(LLAMA, [(1, [3], 0)], [1])
    assert model.greedy_next(rows, storage_for(LLAMA, 8)) == [-1]
    params = DrawParams([0.0], [0], [1.0], [0.0], [0.5], [False])
    assert model.draw_next(rows, params, storage_for(LLAMA, 8)) == [-1]


def test_long_contexts_shared_by_threads_change_no_bit() -> None:
    """One sequence of more than two segments is split between threads; many sequences are not."""
    spec = replace(VARIANTS["llama"], max_context=1024)
    weights = random_weights(spec, quantised=True)
    tables = make_rope_table(RopeSpec(10000.0, 32), 1024, CPU)
    ropes = {RopeSpec(10000.0, 32): (tables.cos, tables.sin)}
    tokens = tokens_for(spec, 700)
    found = []
    for threads in (1, 3):
        model = NativeDecoder(spec, weights, ropes, dequantize, threads)
        storage = KVStorage(KVLayout.from_spec(spec), 64, BLOCK, CPU)
        batches = [_long_batch(tokens[:699], 0), _long_batch(tokens[699:], 699)]
        found.append([model.logits(model.forward(batch, storage))[-1] for batch in batches][-1])
        storage = KVStorage(KVLayout.from_spec(spec), 64, BLOCK, CPU)
        found.append(model.logits(model.forward(_long_batch(tokens, 0), storage))[-1])
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cutting_a_prompt_of_many_segments_changes_no_bit(dtype: torch.dtype) -> None:
    """Two-byte keys of the first 1,024 tokens are converted once for all tiles, later ones are not."""
    spec = replace(VARIANTS["llama"], max_context=1120)
    model = native_model(spec, random_weights(spec, quantised=True), max_context=1120)
    tokens = tokens_for(spec, 1100)
    found = []
    for cuts in ([1100], [1000, 4, 60, 35, 1]):
        storage, start = KVStorage(layout_of(spec, dtype), 80, BLOCK, CPU), 0
        for size in cuts:
            hidden = model.forward(_long_batch(tokens[start : start + size], start, 80), storage)
            start += size
        found.append(model.logits(hidden[-1:]))
    assert torch.equal(*found)


def _long_batch(tokens: list[int], start: int, num_blocks: int = 64) -> ForwardBatch:
    positions = torch.arange(start, start + len(tokens))
    table = torch.arange(1, num_blocks, dtype=torch.int32).unsqueeze(0)
    groups = (GroupTables(table, positions + BLOCK),)
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    context = torch.tensor([start + len(tokens)], dtype=torch.int32)
    ids = torch.tensor(tokens)
    return ForwardBatch(ids, positions, ends, context, groups, torch.arange(len(tokens)), BLOCK, len(tokens), 700)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 4e-2)])
def test_smaller_caches_stay_close(dtype: torch.dtype, tolerance: float) -> None:
    spec = VARIANTS["llama"]
    weights = random_weights(spec)
    tokens = tokens_for(spec, 60)
    expected = all_logits(torch_model(spec, weights), spec, tokens, [60])
    model = native_model(spec, weights)
    found = model.logits(model.forward(batch_of(spec, [(0, tokens, 0)]), storage_for(spec, 1, dtype)))
    assert 0 < (found - expected).norm() / expected.norm() < tolerance


def test_inconsistent_batches_are_refused() -> None:
    spec = VARIANTS["llama"]
    model = native_model(spec, random_weights(spec))
    good = batch_of(spec, [(0, [1, 2, 3], 0)])
    wrong = [
        replace(good, token_ids=torch.tensor([1, 2, spec.vocab_size])),
        replace(good, positions=torch.tensor([0, 1, MAX_CONTEXT])),
        replace(good, context_lens=torch.tensor([2], dtype=torch.int32)),
        replace(good, groups=(replace(good.groups[0], slots=torch.tensor([0, 1, 10**9])),)),
        replace(good, groups=(replace(good.groups[0], block_tables=good.groups[0].block_tables + 10**6),)),
        replace(good, groups=()),
        replace(good, logit_rows=torch.tensor([3])),
    ]
    for batch in wrong:
        with pytest.raises(ValueError, match="batch"):
            model.forward(batch, storage_for(spec, 1))


def test_what_the_kernels_cannot_do_is_said() -> None:
    def refusal(spec: ModelSpec, block_size: int, kv_dtype: str) -> str | None:
        return NATIVE.unsupported_reason(ComputeRequest(spec, "cpu", "float32", kv_dtype, block_size))

    assert refusal(LLAMA, 16, "float32") is None
    assert "multiple of 16" in str(refusal(LLAMA, 8, "float32"))
    assert "int8" in str(refusal(LLAMA, 16, "fp8"))
    assert "multiple of 4" in str(refusal(with_attention(head_dim=30), 16, "int8"))
    assert refusal(with_attention(head_dim=512), 16, "int8") is None
    assert "512" in str(refusal(with_attention(head_dim=528), 16, "float32"))


TEXT = """The harbour lay quiet in the early morning. Boats that had come in during the night were tied up along the
quay, and the fishermen were carrying their boxes to the market hall, where buyers from the town were already waiting.
By noon everything would be sold, the nets would be mended, and the crews would sleep until the evening tide."""


@cache
def torch_logprobs(path: Path) -> tuple[list[int], torch.Tensor]:
    """The tokens of TEXT and what the torch model thinks behind each of them: minutes of arithmetic, done once."""
    spec = read_spec(path)
    tokens = tokenizer_from_gguf(read_gguf_model(path).metadata).encode(TEXT)
    logits = all_logits(torch_model(spec, open_weights(path, spec)), spec, tokens, [len(tokens)])
    return tokens, logits.log_softmax(-1)


def _compare_real(path: Path, limit: float, loss_limit: float, activation_bits: str) -> None:
    """On plain English: the distributions nearly agree, and the text is as likely as to the torch model."""
    spec = read_spec(path)
    tokens, expected = torch_logprobs(path)
    model = native_model(spec, open_weights(path, spec), activation_bits=activation_bits)
    found = all_logits(model, spec, tokens, [20, len(tokens) - 20]).log_softmax(-1)
    divergence = (expected.exp() * (expected - found)).sum(-1)
    assert divergence.mean() < limit
    text = torch.tensor(tokens[1:]).unsqueeze(1)
    losses = [-logprobs[:-1].gather(1, text).mean() for logprobs in (expected, found)]
    assert abs(losses[0] - losses[1]) < loss_limit


@pytest.mark.parametrize(
    ("bits", "limit", "loss_limit"), [("8", 0.01, 0.03), ("mixed", 1e-3, 6e-3), ("16", 1e-5, 1e-3)]
)
def test_smollm2_agrees_with_the_torch_model(smollm2_path: Path, bits: str, limit: float, loss_limit: float) -> None:
    _compare_real(smollm2_path, limit, loss_limit, bits)


@pytest.mark.slow
def test_gemma3_agrees_with_the_torch_model(gemma3_path: Path) -> None:
    """Windows, q/k norms, post norms, two ropes; Q4_K, Q5_0, Q6_K and Q8_0 in one file."""
    _compare_real(gemma3_path, 0.02, 0.03, "8")
