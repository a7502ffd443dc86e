"""Small models with sparse attention, experts without gates, and GGUF's order of recurrent heads."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from tests.support.gguf_converted import write_converted
from tests.support.tiny_models import load_ours, make_reference

DELTA = {
    "rms_norm_eps": 2.0**-20, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mlp_only_layers": [], "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
NAMES = ("deepseek_v32", "glm_moe_dsa", "nemotron_h", "qwen3_5 as GGUF")


def model_path(name: str, folder: Path, shared_dir: Path) -> Path:
    """Return a checkpoint (Nemotron's trained one, others with random weights) or a GGUF file."""
    if name == "nemotron_h":
        return shared_dir / "goldens" / "tiny" / name
    if name != "qwen3_5 as GGUF":
        load_ours(make_reference(name), folder)
        return folder
    load_ours(make_reference("qwen3_5", **DELTA), folder)
    config = json.loads((folder / "config.json").read_text())
    write_converted(folder / "model.gguf", "qwen35", config, load_file(folder / "model.safetensors"))
    return folder / "model.gguf"
