"""GPTQ's and AWQ's layouts, written here value by value, and what is made of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tokenmill import LLM, SamplingParams
from tokenmill.errors import DamagedFile
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.group_quantized import GroupQuantizedCheckpoint
from tokenmill.weights.safetensors_files import SafetensorsCheckpoint

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # which nibble of a word has output 0, 1, ... of its eight


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def quantised(
    weight: torch.Tensor, group: int, *, symmetric: bool
) -> tuple[list[list[int]], list[list[int]], torch.Tensor]:
    """codes [out][in], zeros [out][groups], scales float16 [out, groups]"""
    rng = random.Random(0)
    num_out, num_in = weight.shape
    grouped = weight.view(num_out, num_in // group, group)
    scales = (grouped.abs().amax(2) / 7).half()
    zeros = [[8 if symmetric else rng.randrange(1, 16) for _ in range(num_in // group)] for _ in range(num_out)]
    codes = [
        [
            min(
                15,
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


def written(name: str, layout: str, codes: Any, zeros: Any, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    num_out, num_in, num_groups = len(codes), len(codes[0]), scales.shape[1]

    def along_outputs(table: Any, line: int, low: int) -> list[int]:
        words = []
        for first in range(0, num_out, 8):
            places = AWQ_PLACES if layout == "awq" else range(8)
            words.append(signed(sum((table[first + i][line] - low) << (4 * place) for i, place in enumerate(places))))
        return words

    if layout == "awq":
        qweight = [along_outputs(codes, column, 0) for column in range(num_in)]
    else:
        qweight = [
            [signed(sum(codes[row][first + i] << (4 * i) for i in range(8))) for row in range(num_out)]
            for first in range(0, num_in, 8)
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


def opened(tensors: dict[str, torch.Tensor], layout: str, folder: Path) -> GroupQuantizedCheckpoint:
    save_file(tensors, folder / "model.safetensors")
    return GroupQuantizedCheckpoint(SafetensorsCheckpoint((folder / "model.safetensors",)), config_of(layout))


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
@pytest.mark.parametrize(("group", "symmetric", "quant"), [(32, True, "Q4_0"), (64, False, "Q4_1"), (16, True, None)])
def test_values_are_those_of_the_formula(
    layout: str, group: int, symmetric: bool, quant: str | None, tmp_path: Path
) -> None:
    codes, zeros, scales = quantised(torch.randn(24, 64), group, symmetric=symmetric)
    checkpoint = opened(written("a", layout, codes, zeros, scales), layout, tmp_path)
    assert dict(checkpoint.shapes) == {"a.weight": (24, 64)}
    raw = checkpoint.load("a.weight")
    expected = plain(codes, zeros, scales, [column // group for column in range(64)])
    assert raw.quant == quant and raw.shape == (24, 64)
    # Half precision of -zero * scale is all that may be lost.
    tolerance = 0.0 if symmetric else float(scales.max()) * 15 * 2**-11
    assert float((dequantize(raw) - expected).abs().max()) <= tolerance


def test_columns_in_act_order_keep_their_groups(tmp_path: Path) -> None:
    codes, zeros, scales = quantised(torch.randn(8, 64), 32, symmetric=True)
    owners = [column % 2 for column in range(64)]
    tensors = written("a", "gptq", codes, zeros, scales) | {"a.g_idx": torch.tensor(owners, dtype=torch.int32)}
    raw = opened(tensors, "gptq", tmp_path).load("a.weight")
    assert raw.quant is None and torch.equal(raw.data, plain(codes, zeros, scales, owners))


@pytest.mark.parametrize("change", [{"a.scales": torch.ones(3, 8).half()}, {"a.g_idx": torch.full((64,), 9)}])
def test_parts_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], tmp_path: Path) -> None:
    tensors = written("a", "gptq", *quantised(torch.randn(8, 64), 32, symmetric=True)) | change
    with pytest.raises(DamagedFile):
        opened(tensors, "gptq", tmp_path).load("a.weight")


def write_twins(folder: Path, layout: str, *, hidden: int, group: int, symmetric: bool) -> tuple[Path, Path]:
    """A plain checkpoint, and one in parts with the same values"""
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


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_a_whole_model_answers_like_its_plain_twin(layout: str, tmp_path: Path) -> None:
    folders = write_twins(tmp_path, layout, hidden=64, group=32, symmetric=True)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = [
        LLM(str(folder), device="cpu", backend="reference", dtype="float32", max_context=64, num_blocks=20)
        .generate([[5, 9, 33, 71]], params, progress=False)[0]
        .outputs[0]
        .token_ids
        for folder in folders
    ]
    assert answers[0] == answers[1] and len(set(answers[0])) > 1
