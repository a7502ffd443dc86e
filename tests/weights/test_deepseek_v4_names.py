"""DeepSeek V4's files as they are published: names without a prefix, matrices in fp8 with powers of two for blocks,
experts in MXFP4 as bytes; beside them what transformers writes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weights.test_mxfp4 import rounded
from tokenmill.arch.packed_formats import configured_formats
from tokenmill.arch.read import quantization_config, read_spec
from tokenmill.errors import DamagedFile
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.source import open_weights

BLOCK = 16  # rows and columns that have a scale in common; 128 in the published files
ENDS = {"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "norm.weight"}
PLAIN = ("gate.weight", "weights_proj.weight", "compressor.wkv.weight", "compressor.wgate.weight")


def published(name: str) -> str:
    name = ENDS.get(name, name).replace("hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")
    return name.removeprefix("model.")


@pytest.fixture
def source(shared_dir: Path) -> Path:
    return shared_dir / "goldens" / "tiny" / "deepseek_v4"


def test_published_names_are_the_same_model(source: Path, tmp_path: Path) -> None:
    shutil.copy(source / "config.json", tmp_path)
    tensors = {published(name): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    tensors["mtp.0.norm.weight"] = torch.ones(64)  # of a head that predicts further tokens
    save_file(tensors, tmp_path / "model.safetensors")
    spec = read_spec(tmp_path)
    ours, theirs = open_weights(tmp_path, spec), open_weights(source, spec)
    ours.check()
    for name in theirs.names():
        assert torch.equal(ours.get(name).data, theirs.get(name).data), name


def test_matrices_in_fp8_and_experts_in_mxfp4(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "expert_dtype": "fp4"}))
    tensors, expected = {}, {}
    for theirs, tensor in load_file(source / "model.safetensors").items():
        name = published(theirs)
        if re.search(r"\.experts\.\d+\.w", name):
            blocks, scales = rounded(tensor)
            tensors[name] = blocks.flatten(-2).view(torch.int8)
            tensors[name.replace(".weight", ".scale")] = scales.view(torch.float8_e8m0fnu)
        elif (
            re.search(r"\.(attn|ffn)\.", name)
            and tensor.dim() == 2
            and name.endswith(".weight")
            and not name.endswith(PLAIN)
        ):
            grid = tensor.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
            exponents = torch.ceil(torch.log2(grid.abs().amax((1, 3)) / 448.0))
            spread = torch.exp2(exponents).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            tensors[name] = (tensor.float() / spread).to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".scale")] = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
            expected[theirs] = tensors[name].float() * spread
        else:
            tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    spec = read_spec(tmp_path)
    weights = open_weights(tmp_path, spec)
    weights.check()
    values = dequantize(weights.get("layers.2.q_up.weight"))
    assert torch.equal(values, expected["model.layers.2.attn.wq_b.weight"])
    up = weights.get("layers.1.experts.up.weight")
    assert up.quant == "MXFP4"
    plain = load_file(source / "model.safetensors")["model.layers.1.ffn.experts.3.w3.weight"].float()
    assert (dequantize(up)[3] - plain).norm() / plain.norm() < 0.2
    formats = configured_formats(spec, quantization_config(tmp_path / "config.json"))
    assert formats["layers.1.experts.up.weight"].quant == "MXFP4"
    tensors["layers.1.ffn.experts.3.w3.scale"] = tensors["layers.1.ffn.experts.3.w3.scale"][:, :1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DamagedFile, match="do not match"):
        open_weights(tmp_path, spec)
