"""Expanding and rounding, bit for bit against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME
from tokenmill.errors import UnsupportedModel
from tokenmill.ops.raw import RawTensor
from tokenmill.weights import dequantize as module
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.quantize import QUANTISERS, quantize

FORMATS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
FORMATS += ["IQ4_NL", "IQ4_XS", "MXFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"]
FORMATS += ["TQ1_0", "TQ2_0"]
# Byte offsets of half-precision numbers, kept finite; all other bytes may be anything.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q6_K": (208,), "MXFP4": (), "IQ1_M": (), "TQ1_0": (52,), "TQ2_0": (64,)}


def random_raw(quant: str, shape: tuple[int, ...], seed: int = 0) -> RawTensor:
    rng, kind = np.random.default_rng(seed), GGML_TYPE_BY_NAME[quant]
    num_blocks = int(np.prod(shape)) // kind.block_size
    blocks = rng.integers(0, 256, (num_blocks, kind.block_bytes), dtype=np.uint8)
    for start in HALVES.get(quant, (0,)):
        scales = rng.uniform(-1, 1, (num_blocks, 1)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8)
    data = torch.from_numpy(blocks).view(*shape[:-1], kind.row_bytes(shape[-1]))
    return RawTensor("x", shape, data, quant)


@pytest.mark.parametrize("quant", FORMATS)
def test_equals_the_reference(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_VALUES", 3 * 512)  # several chunks, the last one short
    raw = random_raw(quant, (8, 512))
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.data.numpy(), gguf.GGMLQuantizationType[quant])
        values = dequantize(raw)
    assert values.dtype == torch.float32 and values.shape == (8, 512)
    assert torch.equal(values.nan_to_num(), torch.from_numpy(expected).nan_to_num())
    if quant not in ("IQ1_M", "MXFP4"):  # their scales are among the drawn bytes and may be infinite
        assert torch.isfinite(values).all()


def test_other_dtypes_and_stacks_of_matrices() -> None:
    raw = random_raw("Q4_K", (3, 4, 256))
    values = dequantize(raw, torch.bfloat16)
    assert values.shape == (3, 4, 256)
    assert torch.equal(values, dequantize(raw).to(torch.bfloat16))


def test_cut_rows_are_rows_of_the_whole() -> None:
    raw = random_raw("Q6_K", (10, 256))
    part = RawTensor("x", (4, 256), raw.data.narrow(0, 3, 4), raw.quant)
    assert torch.equal(dequantize(part), dequantize(raw)[3:7])


def test_plain_tensors_pass_through() -> None:
    values = torch.randn(3, 5)
    assert dequantize(RawTensor("x", (3, 5), values)) is values


def test_unknown_format_is_named() -> None:
    raw = RawTensor("blk.0.x", (1, 256), torch.zeros(1, 292, dtype=torch.uint8), "Q8_K")
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.x.*Q8_K"):
        dequantize(raw)


@pytest.mark.parametrize("quant", QUANTISERS)
def test_quantising_equals_the_reference_and_is_close(quant: str) -> None:
    values = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1))
    raw = quantize(values, quant, "x")
    expected = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[quant])
    assert (raw.shape, raw.quant) == ((2, 6, 64), quant)
    assert np.array_equal(raw.data.numpy(), expected)
    steps = {"Q8_0": 127, "Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31}[quant]
    worst = (dequantize(raw) - values).abs().max().item()
    assert worst <= (values.max() - values.min()).item() / steps


def test_quantising_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UnsupportedModel, match="Q4_K"):
        quantize(torch.zeros(1, 256), "Q4_K")
    with pytest.raises(UnsupportedModel, match="rows of 40"):
        quantize(torch.zeros(1, 40), "Q8_0", "x")
