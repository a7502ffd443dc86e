"""The output of llama.cpp's converter for Jamba and for purely recurrent models (see `gguf_converted.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

Config = dict[str, Any]
Renamed = Iterator[tuple[str, torch.Tensor]]


def _jamba(config: Config) -> Config:
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    attends = [index % period == offset for index in range(config["num_hidden_layers"])]
    return {
        "attention.head_count_kv": [config["num_key_value_heads"] * one for one in attends],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_dt_rank"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "expert_count": config["num_experts"],
    }


def _mamba(config: Config) -> Config:
    return {
        "context_length": 2**20,
        "attention.head_count": 0,
        "attention.head_count_kv": None,
        "feed_forward_length": 0,
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["state_size"],
        "ssm.inner_size": config["expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["time_step_rank"],
        "ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba",
    }


def _mamba2(config: Config) -> Config:
    found = {**_mamba(config), "attention.key_length": None, "attention.value_length": None, "ssm.dt_b_c_rms": None}
    return {**found, "ssm.time_step_rank": config["num_heads"], "ssm.group_count": config["n_groups"]}


def _tensors(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    if name.endswith(".A_log"):
        tensor = -tensor.exp()
    yield name.replace("feed_forward.experts", "mlp.experts"), tensor.squeeze(1) if "conv1d.weight" in name else tensor


def _tensors_of_heads(name: str, tensor: torch.Tensor, config: Config) -> Renamed:
    name = name.replace("mixer.dt_bias", "mixer.dt_proj.bias")
    for same, part in _tensors(name, tensor, config):
        if same.endswith((".A_log", ".D")):
            part = part.unsqueeze(-1)
        yield same, part.view(config["n_groups"], -1) if same.endswith("mixer.norm.weight") else part


RECURRENT = {
    "jamba": (_jamba, _tensors),
    "mamba": (_mamba, _tensors),
    "mamba2": (_mamba2, _tensors_of_heads),
}
