"""Records what makers of quantised checkpoints make of a small matrix: the tensors they store, and their own values.

Run by hand where these are installed (`pip install compressed-tensors bitsandbytes hqq nvidia-modelopt`); writes
formats.safetensors beside this file. A case "X" is the tensors "X/a.weight…" as a checkpoint would have them, and
"X/expected", what the maker's own dequantise gives.
"""

from __future__ import annotations

import json
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.nn import Linear4bit
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from safetensors.torch import save_file

OUT, IN = 16, 128
Tensors = dict[str, torch.Tensor]


def matrix(seed: int, out: int = OUT, columns: int = IN) -> torch.Tensor:
    return torch.randn(out, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def compressed(form: str, weight: torch.Tensor, scale: torch.Tensor, extra: Tensors, **arguments: object) -> Tensors:
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments), format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    state = {"weight": weight, "weight_scale": scale, **extra}
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    return {**{f"a.{name}": tensor for name, tensor in stored.items()}, "expected": expected}


def grouped_scales(weight: torch.Tensor, group: int, levels: int) -> torch.Tensor:
    return weight.unflatten(1, (-1, group)).abs().amax(2) / levels


def integer_cases() -> dict[str, Tensors]:
    weight = matrix(0)
    group, row = grouped_scales(weight, 32, 7), grouped_scales(weight, IN, 127)
    zeros = torch.randint(-3, 4, (OUT, IN // 64), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    wide = grouped_scales(weight, 64, 5)
    packed, plain = "pack-quantized", "int-quantized"
    return {
        "w4a16": compressed(packed, weight, group.bfloat16(), {}, num_bits=4, strategy="group", group_size=32),
        "w4a16 float": compressed(packed, weight, group, {}, num_bits=4, strategy="group", group_size=32),
        "w4a16 zeros": compressed(packed, weight, wide.bfloat16(), {"weight_zero_point": zeros}, num_bits=4,
                                  strategy="group", group_size=64, symmetric=False),
        "w8a16": compressed(packed, weight, row.bfloat16(), {}, num_bits=8, strategy="channel"),
        "w3a16": compressed(packed, weight, grouped_scales(weight, 32, 3), {}, num_bits=3, strategy="group",
                            group_size=32),
        "w8a8": compressed(plain, weight, row, {}, num_bits=8, strategy="channel"),
    }  # fmt: skip


def float_cases() -> dict[str, Tensors]:
    weight, large = matrix(2), matrix(3, 64, IN)
    blocks = large.view(2, 32, 2, 64).abs().amax((1, 3)) / 448
    powers = torch.exp2(torch.floor(torch.log2(grouped_scales(weight, 32, 6))))
    of_all = torch.tensor([448 * 6 / float(weight.abs().max())])
    scales = (grouped_scales(weight, 16, 6) * of_all).clamp(max=448).to(torch.float8_e4m3fn).float()
    floats, nv, mx = "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
    return {
        "fp8 tensor": compressed(floats, weight, weight.abs().amax().view(1) / 448, {}, num_bits=8, type="float",
                                 strategy="tensor"),
        "fp8 channel": compressed(floats, weight, grouped_scales(weight, IN, 448).bfloat16(), {}, num_bits=8,
                                  type="float", strategy="channel"),
        "fp8 block": compressed(floats, large, blocks, {}, num_bits=8, type="float", strategy="block",
                                block_structure=[32, 64]),
        "nvfp4": compressed(nv, weight, scales, {"weight_global_scale": of_all}, num_bits=4, type="float",
                            strategy="tensor_group", group_size=16),
        "mxfp4": compressed(mx, weight, powers, {}, num_bits=4, type="float", strategy="group", group_size=32),
        "mxfp8": compressed("mxfp8-quantized", weight, powers / 64, {}, num_bits=8, type="float", strategy="group",
                            group_size=32),
    }  # fmt: skip


def modelopt_nvfp4() -> Tensors:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight = matrix(4)
    made, scales, of_all = NVFP4QTensor.quantize(weight, 16)
    expected = made.dequantize(dtype=torch.float32, scale=scales, double_scale=of_all, block_sizes={-1: 16})
    parts = {"a.weight": made._quantized_data, "a.weight_scale": scales, "a.weight_scale_2": of_all}
    return {**parts, "expected": expected}


def four_bits(kind: str, *, nested: bool) -> Tensors:
    layer = Linear4bit(
        IN, 4 * OUT, bias=False, quant_type=kind, compress_statistics=nested, compute_dtype=torch.bfloat16
    )
    layer.weight.data = matrix(5, 4 * OUT).bfloat16()
    layer.to("cpu")
    stored = {f"a.{name}": tensor for name, tensor in layer.state_dict().items()}
    return {**stored, "expected": bnb.dequantize_4bit(layer.weight.data, layer.weight.quant_state)}


def eight_bits() -> Tensors:
    numbers, scales, _ = bnb.int8_vectorwise_quant(matrix(6).half())
    return {"a.weight": numbers, "a.SCB": scales, "expected": bnb.int8_vectorwise_dequant(numbers, scales)}


def hqq(bits: int, axis: int) -> Tensors:
    layer = torch.nn.Linear(IN, 20, bias=False)
    layer.weight.data = matrix(7, 20)
    settings = BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
    made = HQQLinear(layer, settings, compute_dtype=torch.float32, device="cpu")
    stored = {f"a.{name}": tensor for name, tensor in made.state_dict().items() if isinstance(tensor, torch.Tensor)}
    return {**stored, "expected": made.dequantize()}


def main() -> None:
    cases = {
        **integer_cases(),
        **float_cases(),
        "modelopt nvfp4": modelopt_nvfp4(),
        "nf4": four_bits("nf4", nested=False),
        "nf4 nested": four_bits("nf4", nested=True),
        "fp4": four_bits("fp4", nested=False),
        "int8": eight_bits(),
        **{f"hqq {bits} {axis}": hqq(bits, axis) for bits, axis in ((4, 1), (8, 1), (3, 1), (2, 1), (4, 0))},
    }
    whole = {f"{case}/{name}": tensor.contiguous() for case, parts in cases.items() for name, tensor in parts.items()}
    save_file(whole, Path(__file__).with_name("formats.safetensors"))
    print(json.dumps({case: sorted(parts) for case, parts in cases.items()}, indent=1))


if __name__ == "__main__":
    main()
