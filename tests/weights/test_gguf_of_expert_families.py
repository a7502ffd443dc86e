"""GGUF files of families with routed experts, as llama.cpp's converter writes them. Read back they are the checkpoint's
model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.gguf_converted import Config, write_converted
from tests.support.gguf_experts import EXPERT_CONVERTERS
from tests.support.gguf_logits import expect_logits
from tests.support.tiny_models import LLAMA3_ROPE, load_ours, make_reference
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import FrequencyFactors

EPS = {"rms_norm_eps": 2.0**-20}  # exact in float32, which is what GGUF stores
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.0, "long_mscale": 1.0,
    "original_max_position_embeddings": 256, "short_factor": [1.0, 1.125, 1.25, 1.375, 1.5, 1.625],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}  # fmt: skip
COMMON = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
# family: (architecture, sizes in place of the tiny model's own)
MODELS: dict[str, tuple[str, Config]] = {
    "olmoe": ("olmoe", EPS),
    "granitemoe": ("granitemoe", EPS),
    "granitemoeshared": ("granitemoe", EPS),
    "dots1": ("dots1", {**EPS, "sliding_window": None, "routed_scaling_factor": 1.5}),
    "exaone_moe": ("exaone-moe", {**EPS, "routed_scaling_factor": 1.5}),
    "afmoe": ("afmoe", {**EPS, "route_scale": 1.5, "num_hidden_layers": 5, "layer_types": None}),
    "dbrx": ("dbrx", {}),
    "phimoe": ("phimoe", {**EPS, "rope_parameters": LONG_ROPE, "router_jitter_noise": 0.01}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_checkpoint_s_model(name: str, tmp_path: Path) -> None:
    arch, sizes = MODELS[name]
    theirs = make_reference(name, **sizes)
    checkpoint = load_ours(theirs, tmp_path)
    common = {key: getattr(theirs.config, key) for key in COMMON}
    config: Config = common | json.loads((tmp_path / "config.json").read_text())
    path, tensors = tmp_path / "model.gguf", load_file(tmp_path / "model.safetensors")
    write_converted(path, arch, config, tensors, converter=EXPERT_CONVERTERS[arch])
    spec = read_spec(path)
    assert comparable(spec) == comparable(checkpoint.spec)
    expect_logits(path, spec, theirs)


def comparable(spec: Any) -> Any:
    """A spec without what only one of the two kinds of files says, with numbers as GGUF stores them."""
    eps = float(torch.tensor(spec.norm_eps))
    return replace(spec, norm_eps=eps, name="", dtype="", bos_token_id=None, eos_token_ids=())


def test_factors_of_frequencies_are_llama_4_s_scaling(tmp_path: Path) -> None:
    """Files have Llama 3's scaling as a tensor: by how much each frequency is divided."""
    sizes = {**EPS, "attention_chunk_size": 8192, "floor_scale": 8192, "no_rope_layer_interval": 4}
    theirs = make_reference("llama4", **sizes, rope_parameters=LLAMA3_ROPE)
    load_ours(theirs, tmp_path)
    config: Config = json.loads((tmp_path / "config.json").read_text())
    path = tmp_path / "model.gguf"
    write_converted(path, "llama4", config, load_file(tmp_path / "model.safetensors"))
    spec = read_spec(path)
    assert isinstance(spec.ropes[0].scaling, FrequencyFactors)
    expect_logits(path, spec, theirs)
