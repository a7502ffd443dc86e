"""Attention over a window and compressed entries in the interpreter: logits of whole models, and what is left in the
cache, against the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.support.mixed_requests import slow_but
from tests.support.native_models import VARIANTS, random_weights
from tests.support.paged_run import PagedRun
from tokenmill.arch.compressed import Compression
from tokenmill.arch.indexer import Indexer
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import MlpSpec, ModelSpec, WindowedMqa
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.models.protocol import WeightReader
from tokenmill.ops.interface import Ops
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.ops.triton.attention import sparse, windowed
from tokenmill.ops.triton.build import build_ops
from tokenmill.weights.source import open_weights

OPS, STEADY = build_ops(), build_ops(deterministic=True)
WINDOW = VARIANTS["compressed"].layers[0].mixer
assert isinstance(WINDOW, WindowedMqa)


def one_layer(compression: Compression | None, **changes: object) -> ModelSpec:
    mixer = replace(WINDOW, compression=compression, **changes)  # type: ignore[arg-type]
    layer = replace(VARIANTS["compressed"].layers[0], mixer=mixer, mlp=MlpSpec(48), streams=None)
    return replace(VARIANTS["compressed"], layers=(layer,))


SPECS = {
    "window": one_layer(None),
    "entries": one_layer(Compression(8)),
    "overlapping": one_layer(Compression(4, overlaps=True)),
    "chosen": one_layer(Compression(4, overlaps=True, indexer=Indexer(5, 16, 6))),
    "odd": one_layer(Compression(4, overlaps=True, indexer=Indexer(3, 12, 3)), head_dim=20, num_heads=6, out_groups=3),
}


def run_of(spec: ModelSpec, source: WeightReader, ops: Ops, rows: int = 2, max_len: int = 64) -> PagedRun:
    model = Decoder(spec, Loader(source, ops, torch.float32, torch.device("cpu")), 128)
    return PagedRun(model, num_rows=rows, max_len=max_len, block_size=16)


def logits(run: PagedRun, vocab: int) -> torch.Tensor:
    """Return the logits of a few steps with a prompt in chunks beside a decode row."""
    first, second = torch.randint(3, vocab, (2, 40), generator=torch.Generator().manual_seed(1)).tolist()
    parts = [run.feed({0: first[:30]}), run.feed({0: first[30:31], 1: second[:9]})]
    return torch.cat([*parts, run.feed({0: first[31:36], 1: second[9:10]})])


@pytest.mark.parametrize("ops", [OPS, pytest.param(STEADY, marks=pytest.mark.slow)], ids=["fastest", "deterministic"])
@pytest.mark.parametrize("name", slow_but(["chosen"], SPECS))
def test_logits_and_cache_are_the_references(name: str, ops: Ops) -> None:
    spec = SPECS[name]
    weights = random_weights(spec)
    mine, plain = run_of(spec, weights, ops), run_of(spec, weights, REFERENCE_OPS)
    found, expected = logits(mine, spec.vocab_size), logits(plain, spec.vocab_size)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for field, kept in mine.storage.fields(0).items():
        torch.testing.assert_close(kept[1:], plain.storage.fields(0)[field][1:], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_any_number_of_splits_finds_the_same(splits: int) -> None:
    spec = SPECS["chosen"]
    weights = random_weights(spec)
    expected = logits(run_of(spec, weights, REFERENCE_OPS), spec.vocab_size)
    with patch.object(windowed, "num_latent_splits", lambda *_: splits), patch.object(sparse, "MAX_SCORES", 30):
        found = logits(run_of(spec, weights, OPS), spec.vocab_size)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ops", [OPS, STEADY], ids=["fastest", "deterministic"])
def test_a_trained_model_scores_as_its_reference(ops: Ops, shared_dir: Path) -> None:
    folder = shared_dir / "goldens" / "tiny" / "deepseek_v4"
    spec = read_spec(folder)
    found = logits(run_of(spec, open_weights(folder, spec), ops), spec.vocab_size)
    expected = logits(run_of(spec, open_weights(folder, spec), REFERENCE_OPS), spec.vocab_size)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
