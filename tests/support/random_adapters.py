"""Random PEFT adapters, reproducible anywhere from the names and shapes of their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors.torch import save_file

SAVED_BASE = "base_layer.weight"  # tensors of the base model that PEFT saves with the trained ones


def random_tensor(name: str, shape: list[int]) -> torch.Tensor:
    values = np.random.RandomState(crc32(name.encode())).standard_normal(shape)
    size, shift = (0.1, 1.0) if name.endswith("lora_magnitude_vector") else (0.15, 0.0)
    return torch.from_numpy((values * size + shift).astype(np.float32))


def write_adapter(folder: Path, config: dict[str, Any], shapes: dict[str, list[int]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: random_tensor(name, shape) for name, shape in shapes.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def plain_config(**settings: Any) -> dict[str, Any]:
    """Return the settings of an adapter as PEFT saves them."""
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"], **settings}


def llama_shapes(sizes: dict[str, tuple[int, int]], num_layers: int, rank: int) -> dict[str, list[int]]:
    """Return the shapes of adapter tensors for the modules with these [rows, columns], in every layer."""
    parts = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
    found: dict[str, list[int]] = {}
    for layer in range(num_layers):
        for name, (rows, columns) in sizes.items():
            module = f"base_model.model.model.layers.{layer}.{parts.get(name, 'mlp')}.{name}"
            found[f"{module}.lora_A.weight"] = [rank, columns]
            found[f"{module}.lora_B.weight"] = [rows, rank]
    return found
