"""Whole models with attention over chosen entries, experts without gates or GGUF's order of recurrent heads, in the
interpreter: the reference's logits for a prompt in two chunks and a token behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.newer_families import NAMES, model_path
from tests.support.paged_run import PagedRun
from tokenmill.arch.read import read_spec
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.interface import Ops
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.ops.triton.build import build_ops
from tokenmill.weights.source import open_weights


def logits(path: Path, ops: Ops) -> torch.Tensor:
    spec = read_spec(path)
    model = Decoder(spec, Loader(open_weights(path, spec), ops, torch.float32, torch.device("cpu")))
    run = PagedRun(model, num_rows=1, max_len=32, block_size=16)
    tokens = torch.randint(3, spec.vocab_size, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    return torch.cat([run.feed({0: part}) for part in (tokens[:19], tokens[19:23], tokens[23:])])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_references(name: str, tmp_path: Path, shared_dir: Path) -> None:
    path = model_path(name, tmp_path, shared_dir)
    torch.testing.assert_close(logits(path, build_ops()), logits(path, REFERENCE_OPS), atol=2e-4, rtol=1e-4)
