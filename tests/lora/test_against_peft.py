"""Adapters of every kind that PEFT writes, compared with what PEFT computes (`tests/goldens/record_peft.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapted_models import adaptable_model
from tests.support.paged_run import PagedRun
from tests.support.random_adapters import write_adapter

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "goldens" / "peft.json").read_text())
CASES: dict[str, Any] = RECORDED["cases"]
TOLERANCE = 2e-4


def model_folder(shared: Path, name: str) -> Path:
    return shared / "goldens" / ("stories260K/hf" if name == "stories" else name)


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "cpu"])
@pytest.mark.parametrize("title", CASES)
def test_logits_are_those_of_peft(title: str, backend: str, shared_dir: Path, tmp_path: Path) -> None:
    case, folder = CASES[title], model_folder(shared_dir, CASES[title]["model"])
    adapter = write_adapter(tmp_path, case["config"], case["shapes"])
    loaded = adaptable_model(folder, backend, 2)
    if case["saved"]:  # PEFT saves an embedding that it adapts
        tensors = load_file(adapter / "adapter_model.safetensors")
        embedding = loaded.source.get("embed.weight").data.float()
        save_file(
            {**tensors, **{name: embedding.clone() for name in case["saved"]}}, adapter / "adapter_model.safetensors"
        )
    loaded.put(2, adapter)
    run = PagedRun(loaded.model, 2, 64, block_size=16, adapters=[2, 0])
    found = torch.cat([run.feed({0: RECORDED["prompt"][:5], 1: [1, 5, 9]})[:5], run.feed({0: RECORDED["prompt"][5:]})])
    expected = torch.tensor(case["logits"])
    assert (found[:, :: RECORDED["every"]] - expected).abs().max() < TOLERANCE
