"""MXFP4 checkpoints: the maker's own values, bit for bit; gpt-oss with experts in MXFP4 as its files have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tokenmill import LLM, SamplingParams
from tokenmill.arch.read import read_spec
from tokenmill.errors import DamagedFile
from tokenmill.ops.cpu import is_available
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.mxfp4 import as_gguf_blocks
from tokenmill.weights.source import open_weights

EXPERTS = ("gate_up_proj", "down_proj")


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., columns] → blocks [..., groups, 16] and scales [..., groups], each number the nearest that there is."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-30))) - 2
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = groups / torch.exp2(exponents).unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - numbers).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8)


@pytest.fixture(scope="module")
def mxfp4_dir(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny trained gpt-oss with its experts in MXFP4, and `plain` with the same numbers in bfloat16."""
    source, folder = shared_dir / "goldens" / "tiny" / "gpt_oss", tmp_path_factory.mktemp("mxfp4")
    weights = load_file(source / "model.safetensors")
    packed, plain = dict(weights), dict(weights)
    for name in [name for name in weights if name.endswith(EXPERTS)]:
        blocks, scales = rounded(packed.pop(name).transpose(1, 2))
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    for name, tensors in (("packed", packed), ("plain", plain)):
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "packed" / "config.json").write_text(json.dumps(config))
    return folder


def test_values_are_the_makers_own() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 40, 2), generator=generator, dtype=torch.uint8)
    raw = RawTensor("x", (3, 40, 64), as_gguf_blocks(blocks, scales), "MXFP4")
    for dtype in (torch.float32, torch.bfloat16):
        expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
        assert torch.equal(dequantize(raw, dtype), expected)


def test_every_matrix_of_gpt_oss_has_the_same_numbers(mxfp4_dir: Path) -> None:
    specs = [read_spec(mxfp4_dir / name) for name in ("packed", "plain")]
    packed, plain = (
        open_weights(mxfp4_dir / name, spec) for name, spec in zip(("packed", "plain"), specs, strict=True)
    )
    packed.check()
    for name in plain.names():
        found = packed.get(name)
        assert (found.quant == "MXFP4") == (".experts." in name and name.endswith(".weight"))
        assert torch.equal(dequantize(found), dequantize(plain.get(name)).reshape(found.shape)), name


def greedy(folder: Path, backend: str) -> tuple[list[int], list[float]]:
    llm = LLM(str(folder), backend=backend, threads=1, kv_dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
    (answer,) = llm.generate([[1, 403, 407, 261, 378]], params, progress=False)
    output = answer.outputs[0]
    assert output.logprobs is not None
    return output.token_ids, [one.logprob for one in output.logprobs]


def test_answers_are_those_of_the_expanded_model(mxfp4_dir: Path) -> None:
    """Bit for bit where the reference expands; native kernels round what they multiply packed matrices with."""
    tokens, logprobs = greedy(mxfp4_dir / "plain", "reference")
    assert greedy(mxfp4_dir / "packed", "reference") == (tokens, logprobs)
    if is_available()[0]:
        found, near = greedy(mxfp4_dir / "packed", "cpu")
        same = next((i for i, (a, b) in enumerate(zip(found, tokens, strict=True)) if a != b), len(tokens))
        assert same >= 8 and near[:same] == pytest.approx(logprobs[:same], abs=0.1)


@pytest.mark.parametrize("cut", [(slice(None), slice(0, 1)), (slice(0, 1),)])
def test_scales_that_do_not_fit_are_refused(mxfp4_dir: Path, tmp_path: Path, cut: tuple[slice, ...]) -> None:
    shutil.copytree(mxfp4_dir / "packed", tmp_path / "cut")
    weights = load_file(tmp_path / "cut" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    weights[name] = weights[name][cut].contiguous()
    save_file(weights, tmp_path / "cut" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedFile, match="down_proj"):
        open_weights(tmp_path / "cut", read_spec(tmp_path / "cut"))
