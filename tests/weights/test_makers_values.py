"""Every maker's matrices, read from the tensors that its own library wrote: the values of its own dequantise, bit for
bit (`tests/goldens/record_formats.py` records both); parts that do not fit together are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenmill.errors import DamagedFile
from tokenmill.weights.checkpoint import SafetensorsCheckpoint
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.quantized_checkpoint import QuantizedCheckpoint

GOLDENS = Path(__file__).parents[1] / "goldens" / "formats.safetensors"


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


PACKED = {"form": "pack-quantized", "type": "int", "strategy": "group"}
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "w4a16": (compressed(**PACKED, num_bits=4, group_size=32), "Q4_0"),  # bfloat16 scales that half precision holds
    "w4a16 float": (compressed(**PACKED, num_bits=4, group_size=32), "G4"),
    "w4a16 zeros": (compressed(**PACKED, num_bits=4, group_size=64, symmetric=False), "G4"),
    "w8a16": (compressed("pack-quantized", num_bits=8, type="int", strategy="channel"), "Q8_0"),
    "w3a16": (compressed(**PACKED, num_bits=3, group_size=32), "G4"),
    "w8a8": (compressed("int-quantized", num_bits=8, type="int", strategy="channel"), "G8"),
    "fp8 tensor": (compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), "F8"),
    "fp8 channel": (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), "F8"),
    "fp8 block": (
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, 64]),
        "F8",
    ),
    "nvfp4": (compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), "NV4D"),
    "mxfp4": (compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), "MXFP4"),
    "mxfp8": (compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32), "F8"),
    "modelopt nvfp4": ({"quant_algo": "NVFP4"}, "NV4"),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "NF4"),
    "nf4 nested": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "NF4"),
    "fp4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "FP4"),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "B8"),
    "hqq 4 1": ({"quant_method": "hqq"}, "G4"),
    "hqq 8 1": ({"quant_method": "hqq"}, "G8"),
    "hqq 3 1": ({"quant_method": "hqq"}, "G4"),
    "hqq 2 1": ({"quant_method": "hqq"}, "G4"),
    "hqq 4 0": ({"quant_method": "hqq"}, None),
}


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, torch.Tensor]]:
    cases: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(GOLDENS).items():
        case, _, part = name.partition("/")
        cases.setdefault(case, {})[part] = tensor
    return cases


def opened(tensors: dict[str, torch.Tensor], config: dict[str, Any], folder: Path) -> QuantizedCheckpoint:
    save_file(tensors, folder / "model.safetensors")
    return QuantizedCheckpoint(SafetensorsCheckpoint((folder / "model.safetensors",)), config)


@pytest.mark.parametrize("case", CASES)
def test_values_are_the_makers_own(case: str, recorded: dict[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    parts = dict(recorded[case])
    expected = parts.pop("expected")
    config, quant = CASES[case]
    checkpoint = opened(parts, config, tmp_path)
    assert dict(checkpoint.shapes) == {"a.weight": tuple(expected.shape)}
    raw = checkpoint.load("a.weight")
    assert raw.quant == quant
    values = dequantize(raw)
    assert values.dtype == torch.float32 and values.shape == expected.shape
    assert torch.equal(values.to(expected.dtype), expected), float((values - expected.float()).abs().max())


SCALES = {
    "w4a16": "a.weight_scale",
    "w4a16 zeros": "a.weight_zero_point",
    "w8a8": "a.weight_scale",
    "fp8 channel": "a.weight_scale",
    "fp8 block": "a.weight_scale",
    "nvfp4": "a.weight_scale",
    "mxfp4": "a.weight_scale",
    "modelopt nvfp4": "a.weight_scale_2",
    "nf4": "a.weight.absmax",
    "nf4 nested": "a.weight.nested_absmax",
    "int8": "a.SCB",
    "hqq 4 1": "a.scale",
}


def changed_shapes(scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """Too few and too many, along the last dimension that has some"""
    axis = max((axis for axis, size in enumerate(scales.shape) if size > 1), default=0)
    scales = scales.reshape(scales.shape or (1,))
    return {
        "oversized": torch.cat([scales, scales.narrow(axis, 0, 1)], dim=axis),
        "truncated": scales.narrow(axis, 0, scales.shape[axis] - 1),
    }


@pytest.mark.parametrize("change", ["oversized", "truncated"])
@pytest.mark.parametrize("case", SCALES)
def test_scales_too_few_or_too_many_are_refused(
    case: str, change: str, recorded: dict[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    parts = {name: tensor for name, tensor in recorded[case].items() if name != "expected"}
    parts[SCALES[case]] = changed_shapes(parts[SCALES[case]])[change].contiguous()
    with pytest.raises(DamagedFile, match="a"):
        opened(parts, CASES[case][0], tmp_path).load("a.weight")


@pytest.mark.parametrize("case", ["w8a8", "fp8 channel", "nf4", "hqq 4 1", "int8"])
def test_scales_that_are_no_numbers_are_refused(
    case: str, recorded: dict[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    parts = {name: tensor.clone() for name, tensor in recorded[case].items() if name != "expected"}
    parts[SCALES[case]].view(-1)[0] = float("nan")
    with pytest.raises(DamagedFile, match="finite"):
        opened(parts, CASES[case][0], tmp_path).load("a.weight")


@pytest.mark.parametrize(
    ("case", "part"), [("nvfp4", "a.weight_packed"), ("mxfp4", "a.weight_packed"), ("hqq 4 1", "a.nbits")]
)
def test_scalars_and_empty_tensors_in_the_place_of_parts_are_refused(
    case: str, part: str, recorded: dict[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    parts = {name: tensor for name, tensor in recorded[case].items() if name != "expected"}
    parts[part] = parts[part].flatten()[:0] if part.endswith("nbits") else parts[part].flatten()[0].clone()
    with pytest.raises(DamagedFile, match=r"a\.(weight|nbits)"):
        opened(parts, CASES[case][0], tmp_path).load("a.weight")
