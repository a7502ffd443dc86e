"""Random adapters with the logits that PEFT computes with them (`tests/goldens/record_peft.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.adapted_models import AdaptableModel
from tests.support.paged_run import PagedRun
from tests.support.random_adapters import write_adapter

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "goldens" / "peft.json").read_text())
CASES: dict[str, Any] = RECORDED["cases"]
OF_EXPERTS = [title for title, case in CASES.items() if case["config"]["target_parameters"]]


def model_folder(shared: Path, title: str) -> Path:
    name = CASES[title]["model"]
    return shared / "goldens" / ("stories260K/hf" if name == "stories" else name)


def error_of_logits(title: str, loaded: AdaptableModel, folder: Path) -> float:
    """Return the largest error of a prompt's logits, computed in two chunks beside a row without an adapter.
    `folder`: where to write the adapter."""
    case = CASES[title]
    adapter = write_adapter(folder, case["config"], case["shapes"])
    if case["saved"]:  # PEFT saves an embedding that it adapts
        tensors = load_file(adapter / "adapter_model.safetensors")
        embedding = loaded.source.get("embed.weight").data.float()
        save_file(
            {**tensors, **{name: embedding.clone() for name in case["saved"]}}, adapter / "adapter_model.safetensors"
        )
    loaded.put(2, adapter)
    run = PagedRun(loaded.model, 2, 64, block_size=16, adapters=[2, 0])
    found = torch.cat([run.feed({0: RECORDED["prompt"][:5], 1: [1, 5, 9]})[:5], run.feed({0: RECORDED["prompt"][5:]})])
    return float((found[:, :: RECORDED["every"]].cpu() - torch.tensor(case["logits"])).abs().max())
