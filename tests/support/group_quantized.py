"""Hand-written GPTQ and AWQ tensors, and a model in these formats beside an unquantised model with the same values."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

AWQ_PLACES = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}  # position in a word of outputs 0, 1, ...


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def bit_words(values: list[int], bits: int) -> list[int]:
    """Pack values into words of 32 bits, without gaps."""
    whole = sum(value << (bits * place) for place, value in enumerate(values))
    return [signed((whole >> at) & 0xFFFFFFFF) for at in range(0, len(values) * bits, 32)]


def quantised(
    weight: torch.Tensor, group: int, *, symmetric: bool, bits: int = 4
) -> tuple[list[list[int]], list[list[int]], torch.Tensor]:
    """Quantise a matrix. Returns codes [out][in], zeros [out][groups] and float16 scales [out, groups]."""
    rng = random.Random(0)
    num_out, num_in = weight.shape
    grouped = weight.view(num_out, num_in // group, group)
    middle, most = 1 << (bits - 1), (1 << bits) - 1
    scales = (grouped.abs().amax(2) / (middle - 1)).half()
    zeros = [
        [middle if symmetric else rng.randrange(1, most + 1) for _ in range(num_in // group)] for _ in range(num_out)
    ]
    codes = [
        [
            min(
                most,
                max(0, round(float(weight[row, column] / scales[row, column // group])) + zeros[row][column // group]),
            )
            for column in range(num_in)
        ]
        for row in range(num_out)
    ]
    return codes, zeros, scales


def plain(codes: list[list[int]], zeros: list[list[int]], scales: torch.Tensor, owners: list[int]) -> torch.Tensor:
    return torch.tensor(
        [
            [(code - zeros[row][owner]) * float(scales[row, owner]) for code, owner in zip(line, owners, strict=True)]
            for row, line in enumerate(codes)
        ]
    )


def written(
    name: str, layout: str, codes: Any, zeros: Any, scales: torch.Tensor, bits: int = 4
) -> dict[str, torch.Tensor]:
    num_out, num_in, num_groups = len(codes), len(codes[0]), scales.shape[1]
    each = 32 // bits  # values of a word

    def along_outputs(table: Any, line: int, low: int) -> list[int]:
        words = []
        for first in range(0, num_out, each):
            places = AWQ_PLACES[bits] if layout == "awq" else range(each)
            parts = ((table[first + i][line] - low) << (bits * place) for i, place in enumerate(places))
            words.append(signed(sum(parts)))
        return words

    if layout == "awq":
        qweight = [along_outputs(codes, column, 0) for column in range(num_in)]
    else:
        qweight = [
            [signed(sum(codes[row][first + i] << (bits * i) for i in range(each))) for row in range(num_out)]
            for first in range(0, num_in, each)
        ]
    qzeros = [along_outputs(zeros, number, 1 if layout == "gptq" else 0) for number in range(num_groups)]
    return {
        f"{name}.qweight": torch.tensor(qweight, dtype=torch.int32),
        f"{name}.qzeros": torch.tensor(qzeros, dtype=torch.int32),
        f"{name}.scales": scales.t().contiguous(),
    }


def config_of(layout: str) -> dict[str, Any]:
    if layout == "awq":
        return {"quant_method": "awq", "bits": 4, "version": "gemm"}
    return {"quant_method": "gptq", "bits": 4, "checkpoint_format": layout}


def write_twins(folder: Path, layout: str, *, hidden: int, group: int, symmetric: bool) -> tuple[Path, Path]:
    """Write an unquantised checkpoint, and a quantised one with the same values."""
    sizes = {"vocab_size": 96, "hidden_size": hidden, "intermediate_size": hidden * 3 // 2, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(0)
    twin, packed = folder / "twin", folder / "packed"
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False)).save_pretrained(twin)
    tensors = load_file(twin / "model.safetensors")
    theirs: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        if "_proj" not in name:
            theirs[name] = weight
            continue
        parts = quantised(weight * 10, group, symmetric=symmetric)
        tensors[name] = plain(*parts, [column // group for column in range(weight.shape[1])])
        theirs |= written(name.removesuffix(".weight"), layout, *parts)
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})
    packed.mkdir()
    save_file(theirs, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((twin / "config.json").read_text())
    quantization = config_of(layout) | {"group_size": group, "sym": symmetric, "zero_point": not symmetric}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return twin, packed
