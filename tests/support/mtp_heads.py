"""Checkpoints of tiny models with a multi-token prediction head: transformers' own head, with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")


def make_head(model: transformers.PreTrainedModel, seed: int = 0) -> MtpModel:
    """Make a head over a model; every tensor is far from trivial."""
    config = model.config
    config.num_mtp_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.mtp_layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mtp_mlp_layer_types = ["sparse"]
    head = MtpModel(model, 1).float().eval()
    # GLM-5's layers return an index beside the stream, which transformers' heads don't expect.
    head.layers[0].mtp_block.register_forward_hook(
        lambda _layer, _inputs, out: out[0] if isinstance(out, tuple) else out
    )
    generator = torch.Generator().manual_seed(seed)
    shared = ("embed_tokens.", "shared_head.")
    with torch.no_grad():
        for name, value in (*head.named_parameters(), *head.named_buffers()):
            if name.startswith(shared) or "rotary" in name or not value.is_floating_point():
                continue
            noise = torch.randn(value.shape, generator=generator)
            own = torch.ones_like(value) if "norm" in name and not config.model_type.startswith(QWEN) else 0.0
            value.copy_(own * ("norm" in name) + 0.2 * noise)
    return head


def add_head(head: MtpModel, folder: Path) -> None:
    """Write a head's tensors into its model's checkpoint, under the names that published checkpoints use."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    is_qwen = config["model_type"].startswith(QWEN)
    number = config["num_hidden_layers"]
    layer = "mtp.layers.0." if is_qwen else f"model.layers.{number}."
    joined = (
        {"eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
         "post_norm": "mtp.norm"}
        if is_qwen
        else {"eh_proj": f"{layer}eh_proj", "enorm": f"{layer}enorm", "hnorm": f"{layer}hnorm",
              "post_norm": f"{layer}shared_head.norm"}
    )  # fmt: skip
    has_single_experts = any(".experts.0.gate_proj." in name for name in tensors)
    for name, value in head.state_dict().items():
        if not name.startswith("layers.0."):
            continue
        ours = name.removeprefix("layers.0.")
        part = ours.split(".")[0]
        if part in joined:
            tensors[joined[part] + ours.removeprefix(part)] = value
            continue
        ours = layer + ours.removeprefix("mtp_block.")
        if has_single_experts and ours.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors |= _single_experts(ours, value)
        else:
            tensors[ours] = value
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    if not is_qwen:
        (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


def _single_experts(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    stem, _, part = name.rpartition(".")
    if part == "down_proj":
        return {f"{stem}.{number}.down_proj.weight": one for number, one in enumerate(value)}
    halves = {"gate_proj": value.chunk(2, dim=1)[0], "up_proj": value.chunk(2, dim=1)[1]}
    return {f"{stem}.{number}.{half}.weight": one for half, all_ in halves.items() for number, one in enumerate(all_)}
