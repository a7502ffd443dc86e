"""GPTQ's and AWQ's layouts, written here value by value, and what is made of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.group_quantized import bit_words, config_of, plain, quantised, write_twins, written
from tokenmill import LLM, SamplingParams
from tokenmill.errors import DamagedFile
from tokenmill.weights.checkpoint import SafetensorsCheckpoint
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.quantized_checkpoint import QuantizedCheckpoint


def opened(tensors: dict[str, torch.Tensor], layout: str, folder: Path, bits: int = 4) -> QuantizedCheckpoint:
    save_file(tensors, folder / "model.safetensors")
    config = config_of(layout) | {"bits": bits}
    return QuantizedCheckpoint(SafetensorsCheckpoint((folder / "model.safetensors",)), config)


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "quant"),
    [(4, 32, True, "Q4_0"), (4, 64, False, "G4"), (4, 16, True, None), (8, 32, True, "Q8_0"), (8, 64, False, "G8")],
)
def test_values_are_those_of_the_formula(
    layout: str, bits: int, group: int, symmetric: bool, quant: str | None, tmp_path: Path
) -> None:
    codes, zeros, scales = quantised(torch.randn(24, 64), group, symmetric=symmetric, bits=bits)
    checkpoint = opened(written("a", layout, codes, zeros, scales, bits), layout, tmp_path, bits)
    assert dict(checkpoint.shapes) == {"a.weight": (24, 64)}
    raw = checkpoint.load("a.weight")
    expected = plain(codes, zeros, scales, [column // group for column in range(64)])
    assert raw.quant == quant and raw.shape == (24, 64)
    if quant is None:  # expanded as its maker does it, to the precision of its scales
        expected = expected.half().float()
    assert torch.equal(dequantize(raw), expected)


@pytest.mark.parametrize("bits", [2, 3])
def test_two_and_three_bits_lie_without_gaps(bits: int, tmp_path: Path) -> None:
    """Thirty-two 3-bit values are stored in 3 words; values 10 and 21 straddle two words."""
    rng = random.Random(1)
    codes = [[rng.randrange(1 << bits) for _ in range(64)] for _ in range(32)]
    zeros = [[rng.randrange(1, 1 << bits) for _ in range(2)] for _ in range(32)]
    scales = torch.rand(32, 2).half()
    words = torch.tensor([bit_words(row, bits) for row in codes], dtype=torch.int32)
    low = torch.tensor([bit_words([zeros[row][group] - 1 for row in range(32)], bits) for group in range(2)])
    tensors = {"a.qweight": words.t().contiguous(), "a.qzeros": low.int(), "a.scales": scales.t().contiguous()}
    raw = opened(tensors, "gptq", tmp_path, bits).load("a.weight")
    assert raw.quant == "G4"
    assert torch.equal(dequantize(raw), plain(codes, zeros, scales, [column // 32 for column in range(64)]))


def test_columns_in_act_order_keep_their_groups(tmp_path: Path) -> None:
    codes, zeros, scales = quantised(torch.randn(8, 64), 32, symmetric=True)
    owners = [column % 2 for column in range(64)]
    tensors = written("a", "gptq", codes, zeros, scales) | {"a.g_idx": torch.tensor(owners, dtype=torch.int32)}
    raw = opened(tensors, "gptq", tmp_path).load("a.weight")
    assert raw.quant is None and torch.equal(raw.data, plain(codes, zeros, scales, owners).half())
    assert raw.ordered is not None and raw.ordered.blocks.quant == "Q4_0"
    assert torch.equal(dequantize(raw.ordered.blocks).half(), raw.data[:, raw.ordered.order])


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
