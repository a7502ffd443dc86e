"""GPTQ's and AWQ's layouts, written here value by value, and what is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.group_quantized import config_of, plain, quantised, write_twins, written
from tokenmill import LLM, SamplingParams
from tokenmill.errors import DamagedFile
from tokenmill.weights.checkpoint import SafetensorsCheckpoint
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.group_quantized import GroupQuantizedCheckpoint


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


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_a_whole_model_answers_like_its_plain_twin(layout: str, tmp_path: Path) -> None:
    folders = write_twins(tmp_path, layout, hidden=64, group=32, symmetric=True)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = [
        LLM(str(folder), device="cpu", backend="reference", dtype="float32", threads=1, max_context=64, num_blocks=20)
        .generate([[5, 9, 33, 71]], params, progress=False)[0]
        .outputs[0]
        .token_ids
        for folder in folders
    ]
    assert answers[0] == answers[1] and len(set(answers[0])) > 1
