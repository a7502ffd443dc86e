"""A whole model of short convolutions and attention through Triton's kernels: trained weights, golden logprobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def decoder(path: Path, ops: Ops) -> Decoder:
    spec = read_spec(path)
    return Decoder(spec, Loader(open_weights(path, spec), ops, torch.float32, torch.device("cpu")))


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_trained_model_in_odd_chunks_beside_another_row(deterministic: bool, lfm2_dir: Path) -> None:
    cases: list[dict[str, Any]] = json.loads((lfm2_dir / "golden_greedy.json").read_text())["cases"]
    case = min(cases, key=lambda case: len(case["prompt_ids"]))
    tokens = case["prompt_ids"] + [step["id"] for step in case["greedy"][:8]]
    other = cases[-1]["prompt_ids"]
    found = []
    for ops in (build_ops(deterministic=deterministic), REFERENCE_OPS):
        run = PagedRun(decoder(lfm2_dir, ops), num_rows=2, max_len=64, block_size=16)
        parts = [run.feed({0: tokens[:3], 1: other[:1]})[:3], run.feed({1: other[1:9], 0: tokens[3:4]})[8:]]
        parts += [run.feed({0: tokens[at : at + 1], 1: other[5 + at : 6 + at]})[:1] for at in range(4, len(tokens))]
        found.append(torch.log_softmax(torch.cat(parts), -1))
    ours, reference = found
    assert float((ours - reference).abs().max()) < 1e-3
    first = len(case["prompt_ids"]) - 1
    for at, step in enumerate(case["greedy"][:8], start=first):
        assert int(ours[at].argmax()) == step["id"] or step["margin"] < 1e-3
        assert float(ours[at, step["id"]]) == pytest.approx(step["logprob"], abs=1e-3)
