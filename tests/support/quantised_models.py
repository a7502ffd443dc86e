"""Models in other vendors' quantised formats beside unquantised models with the same values.

A writer takes a matrix and returns the tensors that a checkpoint has for it, by the ends of their names, and the values
that the vendor's formula gives for them. Rounding is simple: to the nearest, with scales from the largest absolute
value.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
Writer = Callable[[torch.Tensor], Written]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip
FP8_BLOCK = 32  # rows and columns


def fp8_blocks(weight: torch.Tensor) -> Written:
    rows, columns = weight.shape
    high, wide = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    padded = torch.zeros(high * FP8_BLOCK, wide * FP8_BLOCK)
    padded[:rows, :columns] = weight
    scales = padded.view(high, FP8_BLOCK, wide, FP8_BLOCK).abs().amax((1, 3)).clamp(min=1e-6) / 448
    spread = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[:rows, :columns]
    numbers = (weight / spread).to(torch.float8_e4m3fn)
    return {".weight": numbers, ".weight_scale_inv": scales}, numbers.float() * spread


def fp8_channels(weight: torch.Tensor) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    numbers = (weight / scales.float()).to(torch.float8_e4m3fn)
    return {
        ".weight": numbers,
        ".weight_scale": scales,
        ".input_scale": torch.ones(1),
    }, numbers.float() * scales.float()


def words_of(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n], each below 16 → int32 [..., n / 8]"""
    pairs = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return pairs.clone(memory_format=torch.contiguous_format).view(torch.int32)


def w4a16_with_zeros(weight: torch.Tensor) -> Written:
    groups = weight.view(len(weight), -1, 32)
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / 15).clamp(min=1e-6)
    zeros = (-low / scales).round().clamp(0, 15)
    codes = (groups / scales.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, 15).to(torch.uint8)
    stored = {
        ".weight_packed": words_of(codes.flatten(1)),
        ".weight_scale": scales,
        ".weight_zero_point": words_of(zeros.to(torch.uint8).t().contiguous()).t().contiguous(),
        ".weight_shape": torch.tensor(weight.shape),
    }
    return stored, ((codes.float() - zeros.unsqueeze(2)) * scales.unsqueeze(2)).flatten(1)


def w8a8(weight: torch.Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scales).round().clamp(-127, 127)
    return {".weight": numbers.to(torch.int8), ".weight_scale": scales}, numbers * scales


def nvfp4(weight: torch.Tensor) -> Written:
    groups = weight.view(len(weight), -1, 16)
    of_all = weight.abs().max() / (6 * 448)
    scales = (groups.abs().amax(2) / 6 / of_all).clamp(min=0.01).to(torch.float8_e4m3fn)
    each = (scales.float() * of_all).unsqueeze(2)
    codes = ((groups / each).abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    values = torch.where(groups < 0, -1.0, 1.0) * E2M1[codes] * each
    flat = (codes + 8 * (groups < 0)).to(torch.uint8).flatten(1)
    packed = flat[:, 0::2] | (flat[:, 1::2] << 4)
    return {".weight": packed, ".weight_scale": scales, ".weight_scale_2": of_all}, values.flatten(1)


def nf4(weight: torch.Tensor) -> Written:
    groups = weight.reshape(-1, 32)
    scales = groups.abs().amax(1).clamp(min=1e-6)
    codes = ((groups / scales.unsqueeze(1)).unsqueeze(-1) - NF4).abs().argmin(-1).to(torch.uint8).flatten()
    state = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": list(weight.shape)}
    stored = {
        ".weight": (codes[0::2] << 4 | codes[1::2]).unsqueeze(1),
        ".weight.absmax": scales,
        ".weight.quant_map": NF4.clone(),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return stored, (NF4[codes.long()].view(-1, 32) * scales.unsqueeze(1)).view(weight.shape)


def mxfp4(weight: torch.Tensor) -> Written:
    groups = weight.view(len(weight), -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(2).clamp(min=1e-30))) - 2
    each = torch.exp2(exponents).unsqueeze(2)
    codes = ((groups / each).abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    values = torch.where(groups < 0, -1.0, 1.0) * E2M1[codes] * each
    flat = (codes + 8 * (groups < 0)).to(torch.uint8).flatten(1)
    packed = flat[:, 0::2] | (flat[:, 1::2] << 4)
    return {".weight_packed": packed, ".weight_scale": (exponents + 127).to(torch.uint8)}, values.flatten(1)


def gptq(weight: torch.Tensor, order: torch.Tensor | None = None) -> Written:
    """Quantise a matrix. `order`: the order in which columns are quantised, group by group; they are stored in their
    original order."""
    order = torch.arange(weight.shape[1]) if order is None else order
    own = order.argsort()
    groups = weight[:, order].view(len(weight), -1, 32)
    scales = ((groups.amax(2) - groups.amin(2)) / 15).clamp(min=1e-6).half()
    zeros = (-groups.amin(2) / scales.float()).round().clamp(1, 16)
    codes = (groups / scales.float().unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, 15).to(torch.uint8)
    stored = {
        ".qweight": words_of(codes.flatten(1)[:, own].contiguous()).t(),
        ".qzeros": words_of((zeros.t() - 1).to(torch.uint8).contiguous()),  # files store zero points minus one
        ".scales": scales.t(),
        ".g_idx": own.int() // 32,
    }
    return stored, ((codes.float() - zeros.unsqueeze(2)) * scales.float().unsqueeze(2)).flatten(1)[:, own]


def gptq_act_order(weight: torch.Tensor) -> Written:
    """Use another order for each matrix; readers expand such values to the precision of their scales."""
    generator = torch.Generator().manual_seed(int(weight.abs().sum() * 1000))
    stored, values = gptq(weight, torch.randperm(weight.shape[1], generator=generator))
    return stored, values.half().float()


def hqq(weight: torch.Tensor, axis: int = 1) -> Written:
    """Quantise groups of 32 columns of a row (axis 1), or of 32 rows of a column (axis 0)."""
    groups = weight.reshape(-1, 32) if axis == 1 else weight.reshape(32, -1)
    low, high = groups.amin(axis, keepdim=True), groups.amax(axis, keepdim=True)
    scales = ((high - low) / 15).clamp(min=1e-6)
    zeros = -low / scales
    codes = (groups / scales + zeros).round().clamp(0, 15).to(torch.uint8)
    first, second = codes.chunk(2)
    settings = {".shape": list(weight.shape), ".nbits": [4], ".group_size": [32], ".axis": [axis]}
    stored = {".W_q": first << 4 | second, ".scale": scales, ".zero": zeros}
    stored |= {ending: torch.tensor(values) for ending, values in settings.items()}
    return stored, ((codes.float() - zeros) * scales).view(weight.shape)


def hqq_rows(weight: torch.Tensor) -> Written:
    return hqq(weight, axis=0)


def bnb_int8(weight: torch.Tensor) -> Written:
    largest = weight.abs().amax(1)
    numbers = (weight * (127 / largest).unsqueeze(1)).round()
    return {".weight": numbers.to(torch.int8), ".SCB": largest}, numbers * (largest / 127).unsqueeze(1)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


CONFIGS: dict[str, dict[str, Any]] = {
    "fp8 blocks": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]},
    "fp8 channels": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "w4a16": compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False
    ),
    "w8a8": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "mxfp4": compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "gptq act order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    "hqq": {"quant_method": "hqq", "quant_config": {"nbits": 4, "group_size": 32, "axis": 1}},
    "hqq rows": {"quant_method": "hqq", "quant_config": {"nbits": 4, "group_size": 32, "axis": 0}},
    "bnb int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}  # fmt: skip
WRITERS: dict[str, Writer] = {
    "fp8 blocks": fp8_blocks,
    "fp8 channels": fp8_channels,
    "w4a16": w4a16_with_zeros,
    "w8a8": w8a8,
    "nvfp4": nvfp4,
    "nf4": nf4,
    "mxfp4": mxfp4,
    "gptq": gptq,
    "gptq act order": gptq_act_order,
    "hqq": hqq,
    "hqq rows": hqq_rows,
    "bnb int8": bnb_int8,
}


def mixed_config(names: dict[str, str]) -> dict[str, Any]:
    """Return ModelOpt's config with an algorithm for each module."""
    layers = {name: {"quant_algo": "FP8" if kind == "fp8 channels" else "NVFP4"} for name, kind in names.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def write_quantised_twins(source: Path, folder: Path, kind: str) -> tuple[Path, Path]:
    """Write a model with quantised projections and one with the same values in float32; return both. Kind "mixed":
    fp8 for attention, NVFP4 for the rest."""
    tensors = load_file(source / "model.safetensors")
    packed, plain, chosen = dict(tensors), dict(tensors), {}
    for name in [name for name in tensors if name.endswith("_proj.weight") and ".layers." in name]:
        stem = name.removesuffix(".weight")
        chosen[stem] = kind if kind != "mixed" else "fp8 channels" if "attn" in name else "nvfp4"
        parts, values = WRITERS[chosen[stem]](packed.pop(name).float())
        packed |= {stem + ending: tensor.contiguous() for ending, tensor in parts.items()}
        plain[name] = values
    config = json.loads((source / "config.json").read_text())
    quantization = mixed_config(chosen) if kind == "mixed" else CONFIGS[kind]
    places = []
    for place, found, more in (("packed", packed, {"quantization_config": quantization}), ("plain", plain, {})):
        shutil.copytree(source, folder / place, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(found, folder / place / "model.safetensors", metadata={"format": "pt"})
        (folder / place / "config.json").write_text(json.dumps(config | more))
        places.append(folder / place)
    return places[0], places[1]
