"""Families with recurrent layers and random weights on native kernels: the same bits however a sequence of 300 tokens
is cut and whatever is computed beside it, and the logits of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from tests.support.hybrids import RANDOM
from tests.support.native_models import SETS, native_model
from tests.support.paged_run import PagedRun
from tests.support.tiny_models import NATIVE_SIZES, VOCAB, load_ours, make_reference
from tokenmill.ops.cpu import is_available
from tokenmill.weights.source import open_weights

pytestmark = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
LENGTH = 300


def tokens_of(seed: int, length: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", RANDOM)
def test_cuts_and_neighbours_change_no_bit(name: str, tmp_path: Path) -> None:
    """States are written at 64, 128, 192 and 256; cuts lie on them, beside them and far from them."""
    theirs = make_reference(name, max_position_embeddings=320, **NATIVE_SIZES.get(name, {}))
    spec = load_ours(theirs, tmp_path).spec
    run = PagedRun(native_model(spec, open_weights(tmp_path, spec), max_context=320), 5, 320, block_size=16)
    tokens, other = tokens_of(1, LENGTH), tokens_of(2, 90)
    whole, alone = run.feed({0: tokens}), run.feed({1: other})
    with torch.inference_mode():
        torch.testing.assert_close(whole, theirs(torch.tensor([tokens])).logits[0], atol=2e-4, rtol=0)
    cuts = [1, 62, 1, 1, 63, 7, 37, 20, 65, 43]
    assert sum(cuts) == LENGTH
    parts = torch.split(torch.tensor(tokens), cuts)
    assert torch.equal(torch.cat([run.feed({2: part.tolist()}) for part in parts]), whole)
    mixed, beside = [run.feed({3: tokens[:100]})], []
    for start, end in ((0, 50), (50, 51), (51, 64), (64, 90)):
        found = run.feed({4: other[start:end], 3: tokens[100 + 2 * start : 100 + 2 * end]})
        beside.append(found[: end - start])
        mixed.append(found[end - start :])
    mixed.append(run.feed({3: tokens[280:]}))
    assert torch.equal(torch.cat(mixed), whole)
    assert torch.equal(torch.cat(beside), alone)


def test_mamba2_norms_each_group_of_its_output(tmp_path: Path) -> None:
    """As the original code and llama.cpp do; in transformers Mamba-2 norms all groups together, but Zamba 2 each."""
    theirs = make_reference("mamba2", n_groups=2, state_size=16)
    for layer in theirs.backbone.layers:
        norm = layer.mixer.norm
        layer.mixer.norm = Zamba2RMSNormGated(96, group_size=48, eps=norm.variance_epsilon)
        layer.mixer.norm.weight = norm.weight
    spec = load_ours(theirs, tmp_path).spec
    native = native_model(spec, open_weights(tmp_path, spec), max_context=256)
    tokens = tokens_of(4, 70)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(PagedRun(native, 1, 80, 16).feed({0: tokens}), expected, atol=2e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("name", RANDOM)
def test_every_instruction_set_computes_the_reference(name: str, instruction_set: str, tmp_path: Path) -> None:
    ours = load_ours(make_reference(name, **NATIVE_SIZES.get(name, {})), tmp_path)
    weights = open_weights(tmp_path, ours.spec)
    native = native_model(ours.spec, weights, isa=instruction_set, max_context=256)
    tokens = tokens_of(3, 140)
    found, expected = (PagedRun(model, 1, 160, 16).feed({0: tokens}) for model in (native, ours))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
