"""Compares the logits of a GGUF file's model with those of the transformers model whose weights it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.paged_run import PagedRun, feed_in_chunks
from tests.support.tiny_models import VOCAB
from tokenmill.arch.spec import ModelSpec
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.weights.source import open_weights


def expect_logits(path: Path, spec: ModelSpec, theirs: Any) -> None:
    """Load a file with every tensor of the spec, and compare the logits of 21 tokens through the paged KV cache."""
    weights = open_weights(path, spec)
    weights.check()
    model = Decoder(spec, Loader(weights, REFERENCE_OPS, torch.float32, torch.device("cpu")))
    tokens = torch.randint(3, VOCAB, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    found = feed_in_chunks(PagedRun(model, 1, 32), 0, tokens, 7)
    with torch.inference_mode():
        torch.testing.assert_close(found, theirs(torch.tensor([tokens])).logits[0], atol=2e-4, rtol=0)
