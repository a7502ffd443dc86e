"""Trained models of current families with Triton kernels in the interpreter: the logits of the reference, for a prompt
in two chunks and a token behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.paged_run import PagedRun
from tokenmill.arch.read import read_spec
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.interface import Ops
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.ops.triton.build import build_ops
from tokenmill.weights.source import open_weights

SLOW = (
    "exaone4",
    "gemma3n",
    "gemma4",
    "gemma4_moe",
    "glm4_moe",
    "gpt_oss",
    "lfm2_moe",
    "llama4",
    "minimax_m2",
    "olmo3",
    "smollm3",
)
TOKENS = [1, 403, 407, 261, 378, 12, 99, 200, 31, 5, 77, 410, 300, 44, 8, 17, 260, 19, 20, 390, 22, 403, 24, 25]


def logits(folder: Path, ops: Ops) -> torch.Tensor:
    spec = read_spec(folder)
    model = Decoder(spec, Loader(open_weights(folder, spec), ops, torch.float32, torch.device("cpu")))
    run = PagedRun(model, num_rows=1, max_len=32, block_size=16)
    parts = [run.feed({0: TOKENS[:19]}), run.feed({0: TOKENS[19:-1]}), run.feed({0: TOKENS[-1:]})]
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["ministral3", *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_logits_are_the_references(name: str, shared_dir: Path) -> None:
    folder = shared_dir / "goldens" / "tiny" / name
    found, expected = logits(folder, build_ops()), logits(folder, REFERENCE_OPS)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
