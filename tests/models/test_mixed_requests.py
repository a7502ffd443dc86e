"""Requests of one step change no bit of each other: tiny models with routed experts on the native CPU kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.native_models import native_model
from tests.support.paged_run import PagedRun, feed_in_chunks
from tests.support.tiny_expert_models import EXPERT_MODELS
from tests.support.tiny_models import VOCAB, load_ours, make_reference
from tokenmill.ops.cpu import is_available
from tokenmill.weights.source import open_weights

ALWAYS = ("afmoe", "cohere2_moe", "laguna", "phimoe")


@pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in EXPERT_MODELS]
)
def test_rows_are_the_same_alone_and_together(name: str, tmp_path: Path) -> None:
    """A chunk of a prompt, a row that decodes, and a whole prompt."""
    spec = load_ours(make_reference(name), tmp_path).spec
    model = native_model(spec, open_weights(tmp_path, spec), max_context=spec.max_context)
    tokens = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [tokens, tokens[7:31], tokens[20:] + tokens[:13]]
    alone = [feed_in_chunks(PagedRun(model, 1, 48, block_size=16), 0, row, len(row)) for row in rows]
    run = PagedRun(model, num_rows=3, max_len=48, block_size=16)
    run.feed({0: rows[0][:9]})
    run.feed({1: rows[1][:-1]})
    together = run.feed({0: rows[0][9:], 1: rows[1][-1:], 2: rows[2]})
    assert torch.equal(together, torch.cat((alone[0][9:], alone[1][-1:], alone[2])))
