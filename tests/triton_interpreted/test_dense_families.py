"""Random models of further families with Triton kernels in the interpreter, for what the kernels and composed regions
compute only for them: the logits of the reference, for a prompt in two chunks and a token behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.paged_run import PagedRun
from tests.support.tiny_models import VOCAB, load_ours, make_reference
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.triton.build import build_ops
from tokenmill.weights.source import open_weights


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["apertus", "gpt2", "gpt_neox", "nemotron", "olmo", "opt", "axk1", "kolibri1", "phimoe"]
)
def test_logits_are_the_references(name: str, tmp_path: Path) -> None:
    reference = load_ours(make_reference(name), tmp_path)
    load = Loader(open_weights(tmp_path, reference.spec), build_ops(), torch.float32, torch.device("cpu"))
    tokens = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    found, expected = (logits(model, tokens) for model in (Decoder(reference.spec, load), reference))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    run = PagedRun(model, num_rows=1, max_len=32, block_size=16)
    return torch.cat([run.feed({0: tokens[:19]}), run.feed({0: tokens[19:-1]}), run.feed({0: tokens[-1:]})])
