"""Matrix products on packed weights against float64, for every format, row count and instruction set; and the promise
that a row's bits do not depend on its neighbours."""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tokenmill.arch.block_formats import OTHER_TYPES
from tokenmill.ops.blocks import expanded
from tokenmill.ops.cpu import instruction_sets, is_available
from tokenmill.ops.cpu.availability import native
from tokenmill.ops.cpu.packing import PACKED_QUANTS, kind_of, pack_as, quantized_q8
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.dequantize import dequantize

pytestmark = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])

SETS = instruction_sets() if is_available()[0] else []
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HALVES_AT = {"MXFP4": (), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES_AT |= {"Q2_K": (80, 82), "Q3_K": (108,)}
EXACT = {"F8", *PLAIN}  # multiplied with inputs that are not rounded
KINDS = sorted(PACKED_QUANTS | PLAIN.keys() | {"G4:4", "G8:2", "NF4:2", "F8:4"})
MOST_ROWS = 29
COARSE = math.inf  # no block has second bytes


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(values float64, bytes as a file holds them)"""
    rng = np.random.default_rng(seed)
    if kind in PLAIN:
        plain = torch.from_numpy(rng.standard_normal((rows, columns))).to(PLAIN[kind])
        return plain.double().numpy(), plain.view(torch.uint8).numpy()
    if kind.partition(":")[0] in OTHER_TYPES:
        return other_blocks(*kind.partition(":")[::2], rows, columns, rng)
    quant = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[quant]
    blocks = rng.integers(0, 256, (rows, columns // values, size), np.uint8)
    for at in HALVES_AT.get(kind, (0,)):
        scales = rng.uniform(0.001, 0.01, (rows, columns // values, 1)).astype(np.float16)
        blocks[:, :, at : at + 2] = scales.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] = rng.integers(115, 125, blocks.shape[:2])  # exponents
    source = blocks.reshape(rows, -1)
    return gguf.quants.dequantize(source, quant).astype(np.float64), source


def other_blocks(
    kind: str, group: str, rows: int, columns: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks that GGUF has not, with float32 scales, of which `group` neighbours have the same"""
    size, every = OTHER_TYPES[kind].block_bytes, int(group or 1)
    count = columns // 32
    blocks = rng.integers(0, 256, (rows, count, size), np.uint8)

    def put(at: int, numbers: np.ndarray, times: int) -> None:
        blocks[:, :, at : at + 4] = np.repeat(numbers.astype(np.float32), times, axis=1).view(np.uint8)

    groups = (rows, count // every, 1)
    put(0, rng.uniform(0.001, 0.01, groups), every)
    if kind in ("G4", "G8"):
        put(4, rng.integers(0, 16 if kind == "G4" else 256, groups), every)
    if kind == "NV4":
        put(0, rng.uniform(0.001, 0.01, (rows, 1, 1)), count)
        blocks[:, :, 4:6] = rng.integers(40, 80, (rows, count, 2))  # scales about 1
    if kind == "F8":
        blocks[:, :, 4:] &= 0xBF
    flat = torch.from_numpy(blocks.reshape(-1, size))
    values = expanded(kind, flat)
    return values.view(rows, columns).double().numpy(), blocks.reshape(rows, -1)


def rounded_inputs(x: np.ndarray, kind: str, outlier_threshold: float) -> np.ndarray:
    """What the kernel multiplies where weights are quantised: whole numbers per block of 32 with one byte, or two where
    the block's largest number is more than `outlier_threshold` times the quadratic mean of all blocks' largest."""
    if kind.partition(":")[0] in EXACT:
        return x.astype(np.float64)
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    nonzero = np.where(largest == 0, 1, largest)
    if math.isinf(outlier_threshold):
        return (np.rint(blocks * (np.float32(127) / nonzero)) * (largest / np.float64(127))).reshape(x.shape)
    numbers = np.rint(blocks * (np.float32(127 * 256) / nonzero)).astype(np.int32)
    is_fine = largest > outlier_threshold * np.sqrt(np.mean(largest**2, axis=1, keepdims=True))
    numbers = np.where(is_fine, numbers, (numbers + 128) >> 8 << 8)
    return (numbers * (largest / np.float64(127 * 256))).reshape(x.shape)


def with_outliers(x: np.ndarray, seed: int = 5) -> np.ndarray:
    """One number in a hundred is ten times as large."""
    return np.where(np.random.default_rng(seed).random(x.shape) < 0.01, 10 * x, x).astype(np.float32)


def product(bench: Any, matrix: Any, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    out = np.empty((len(x), matrix.rows), np.float32)
    bench.linear(matrix, bias, x, out)
    return out


@pytest.mark.parametrize(("shape", "outlier_threshold"), [((37, 256), COARSE), ((37, 256), 0.0), ((96, 768), 1.2)])
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_product_is_right_and_rows_keep_their_bits(
    isa: str, kind: str, shape: tuple[int, int], outlier_threshold: float
) -> None:
    values, source = random_blocks(kind, *shape)
    matrix = native().pack(kind, *shape, source)
    x = with_outliers(np.random.default_rng(1).standard_normal((MOST_ROWS, shape[1])))
    bench = native().Bench(2, isa, outlier_threshold)
    together = product(bench, matrix, x)
    expected = rounded_inputs(x, kind, outlier_threshold) @ values.T
    assert np.abs(together - expected).max() < 2e-4 * np.abs(expected).max()
    for rows in (1, 2, 3, 5, 7, 8, 9, 12, 16, 17):
        assert np.array_equal(product(bench, matrix, x[:rows]), together[:rows])
        assert np.array_equal(product(bench, matrix, x[-rows:]), together[-rows:])


@pytest.mark.parametrize("kind", sorted(PACKED_QUANTS - EXACT))
def test_two_bytes_round_a_hundred_times_finer(kind: str) -> None:
    values, source = random_blocks(kind, 64, 512)
    matrix = native().pack(kind, 64, 512, source)
    x = np.random.default_rng(3).standard_normal((11, 512)).astype(np.float32)
    exact = x.astype(np.float64) @ values.T
    coarse, fine = (np.linalg.norm(product(native().Bench(1, "", f), matrix, x) - exact) for f in (COARSE, 0.0))
    assert fine < coarse / 100


def test_outliers_cost_little_where_their_blocks_are_fine() -> None:
    """Rows of 64 blocks, in two of which one number is 50 times as large as the others."""
    values, source = random_blocks("Q4_1", 64, 2048)
    matrix = native().pack("Q4_1", 64, 2048, source)
    x = np.random.default_rng(4).standard_normal((9, 2048)).astype(np.float32)
    x[:, [100, 1500]] *= 50
    exact = x.astype(np.float64) @ values.T
    coarse, mixed = (np.linalg.norm(product(native().Bench(1, "", f), matrix, x) - exact) for f in (COARSE, 2.0))
    assert mixed < coarse / 3


@pytest.mark.parametrize("outlier_threshold", [COARSE, 1.2, 0.0])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K", "Q2_K", "NV4", "G8:2", "F32"])
def test_hundreds_of_rows_equal_single_ones(kind: str, outlier_threshold: float) -> None:
    _, source = random_blocks(kind, 80, 1024)
    matrix = native().pack(kind, 80, 1024, source)
    x = with_outliers(np.random.default_rng(2).standard_normal((211, 1024)))
    bench = native().Bench(2, "", outlier_threshold)
    together = product(bench, matrix, x)
    for row in (0, 5, 95, 96, 97, 210):
        assert np.array_equal(product(bench, matrix, x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("kind", KINDS)
def test_lookup_gives_the_files_own_values(isa: str, kind: str) -> None:
    values, source = random_blocks(kind, 50, 512)
    matrix = native().pack(kind, 50, 512, source)
    ids = np.array([0, 17, 49, 17])
    out = np.empty((4, 512), np.float32)
    native().embed_rows(matrix, ids, 2.0, out, isa)
    assert np.allclose(out, 2.0 * values[ids], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("quant", ["B8", "NV4D"])
def test_formats_that_differ_in_rounding_only_are_packed_as_another(quant: str) -> None:
    """bitsandbytes' int8 and compressed-tensors' NVFP4, whose makers round scales in an order of their own"""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (24, 4, OTHER_TYPES[quant].block_bytes), np.uint8)
    of_row = rng.uniform(1, 2, (24, 1, 1)).astype(np.float32)
    data[:, :, :4] = np.repeat(of_row, 4, axis=1).view(np.uint8)
    if quant == "NV4D":
        data[:, :, 4:6] = rng.integers(40, 80, (24, 4, 2))
    raw = RawTensor("x", (24, 128), torch.from_numpy(data.reshape(24, -1)), quant, blocks_per_scale=4)
    matrix = pack_as(kind_of(raw, "none"), raw, dequantize)
    out = np.empty((24, 128), np.float32)
    native().embed_rows(matrix, np.arange(24), 1.0, out, "")
    assert np.allclose(out, dequantize(raw).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("quant", ["NF4", "FP4"])
def test_tables_of_floats_keep_sixteen_bits(quant: str) -> None:
    _, source = random_blocks(quant, 24, 128)
    raw = RawTensor("x", (24, 128), torch.from_numpy(source), quant)
    assert {kind_of(raw, quantization) for quantization in ("none", "int8")} == {quant}
    out = np.empty((24, 128), np.float32)
    native().embed_rows(pack_as(quant, raw, dequantize), np.arange(24), 1.0, out, "")
    assert float(np.abs(out - dequantize(raw).numpy()).max() / 0.01) < 2e-5  # of the largest scale


def test_bias_is_added() -> None:
    _, source = random_blocks("Q8_0", 40, 64)
    x = np.zeros((3, 64), np.float32)
    bias = np.arange(40, dtype=np.float32)
    matrix = native().pack("Q8_0", 40, 64, source)
    assert np.array_equal(product(native().Bench(1), matrix, x, bias), np.tile(bias, (3, 1)))


@pytest.mark.parametrize("outlier_threshold", [COARSE, 1.2, 0.0])
def test_zeros_and_huge_inputs_stay_finite(outlier_threshold: float) -> None:
    _, source = random_blocks("Q4_0", 16, 64)
    x = np.zeros((2, 64), np.float32)
    x[1, 3] = 1e30
    out = product(native().Bench(1, "", outlier_threshold), native().pack("Q4_0", 16, 64, source), x)
    assert np.array_equal(out[0], np.zeros(16, np.float32))
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize(
    ("kind", "rows", "columns"), [("Q8_0", 4, 33), ("Q4_K", 4, 32), ("Q8_0", 0, 32), ("IQ2_XXS", 4, 256)]
)
def test_impossible_matrices_are_refused(kind: str, rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match="kind"):
        native().pack(kind, rows, columns, np.zeros((rows, 34), np.uint8))


def test_bytes_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 34 bytes"):
        native().pack("Q8_0", 4, 32, np.zeros((4, 33), np.uint8))


def test_int8_quantisation_is_q8_0() -> None:
    values = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    blocks = quantized_q8(values).numpy()
    back = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    assert np.abs(back - values.numpy()).max() < values.abs().max().item() / 127 * 0.51
