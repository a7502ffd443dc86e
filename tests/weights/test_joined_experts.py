"""Matrices of all experts that a checkpoint stores as one (DBRX): parts of them are parts of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import make_reference
from tokenmill.arch.read import read_spec
from tokenmill.weights.source import open_weights


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_parts_are_those_of_the_whole(part: str, tmp_path: Path) -> None:
    theirs = make_reference("dbrx")
    theirs.save_pretrained(tmp_path)
    weights, name = open_weights(tmp_path, read_spec(tmp_path)), f"layers.1.experts.{part}.weight"
    whole = weights.get(name).data
    stored = getattr(theirs.transformer.blocks[1].ffn.experts.mlp, {"gate": "w1", "up": "v1", "down": "w2"}[part])
    each = stored.detach().view(5, 24, 48)
    assert torch.equal(whole, each.transpose(1, 2) if part == "down" else each)
    found = weights.get(name, rows=(3, 11), experts=[1, 2, 4])
    assert found.shape == found.data.shape and torch.equal(found.data, whole[[1, 2, 4], 3:11])
    assert torch.equal(weights.get(name, columns=(2, 20)).data, whole[..., 2:20])
