"""Codes of a table (nf4, fp4, IQ4), and integers in act order, multiplied in their bits, in the interpreter"""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import gguf
import pytest
import torch

from tests.support.table_matrices import act_order, table_matrix
from tests.support.triton_inputs import assert_near
from tokenmill.arch.packed_formats import StoredFormat, packed_int_format
from tokenmill.arch.unproven import VARIABLE
from tokenmill.ops.blocks import TABLES
from tokenmill.ops.interface import LinearWeight
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.gemm import linear
from tokenmill.ops.triton.gemm.splitk import SplitKConfig
from tokenmill.ops.triton.quant import gemm_table, packed_table, quantized
from tokenmill.ops.triton.quant.quantized import OrderedMatrix, PackedIntMatrix
from tokenmill.weights.dequantize import dequantize

OPS = build_ops()


@pytest.fixture(autouse=True)
def unproven_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


DENSE = partial(dequantize, dtype=torch.bfloat16)
KINDS = [("NF4", 1), ("NF4", 2), ("FP4", 4), ("IQ4_NL", 1), ("IQ4_XS", 1)]


def packed(raw: RawTensor) -> packed_table.TableMatrix:
    form = packed_int_format(raw.name, raw.shape, StoredFormat(str(raw.quant), raw.blocks_per_scale))
    assert form is not None and form.table == raw.quant
    return packed_table.table_from_blocks(raw.data, form)


@pytest.mark.parametrize(("quant", "blocks_per_scale"), KINDS)
def test_values_are_the_maker_s_bit_for_bit(quant: str, blocks_per_scale: int) -> None:
    """Scales are kept as they are, and multiplied as their maker does it."""
    raw = table_matrix(quant, (40, 512), 1, blocks_per_scale)
    matrix = packed(raw)
    assert matrix.group == 32 * blocks_per_scale and matrix.num_columns == 512
    found = packed_table.dequantize_table(matrix, slice(8, 40), torch.float32)
    assert torch.equal(found, dequantize(raw)[8:])
    if quant.startswith("IQ4"):
        maker = gguf.quants.dequantize(raw.data.numpy(), gguf.GGMLQuantizationType[quant])
        assert torch.equal(found, torch.from_numpy(maker)[8:])


@pytest.mark.parametrize("quant", TABLES)
def test_numbers_that_hopper_s_kernel_picks_are_the_table(quant: str) -> None:
    """As it does it: bytes by the lower three bits of a code out of each half, then by the fourth bit. fp4's and IQ4's
    values have no more than 8 bits, nf4's are rounded."""
    table = packed_table.table_of(quant, torch.device("cpu"))
    planes = table[: packed_table.BYTE_PLANES].view(torch.uint8).view(2, 16)
    picked = torch.stack([planes[:, code] for code in range(16)]).contiguous().view(torch.bfloat16).view(-1)
    factor = table[packed_table.FACTOR :].view(torch.float32)
    found, values = picked.float() * factor, torch.tensor(TABLES[quant], dtype=torch.float32)
    assert torch.equal(table[8:24].view(torch.float32), values)
    if quant == "NF4":
        assert float((found - values).norm() / values.norm()) < 0.0007
    else:
        torch.testing.assert_close(found, values, rtol=2e-7, atol=0.0)


@pytest.mark.parametrize(("quant", "blocks_per_scale"), KINDS)
def test_matrices_are_multiplied_as_they_are(quant: str, blocks_per_scale: int) -> None:
    """Two of them stacked, in few rows and in many; what is planned is what is taken."""
    raws = [table_matrix(quant, (num_out, 512), num_out, blocks_per_scale) for num_out in (24, 56)]
    bias, exact = torch.randn(80), torch.cat([dequantize(raw) for raw in raws])
    kept = OPS.pack_linear(raws, bias, DENSE)
    matrix = kept.packed
    assert isinstance(matrix, packed_table.TableMatrix) and (kept.rows, kept.columns) == (80, 512)
    forms = [packed_int_format(raw.name, raw.shape, StoredFormat(quant, blocks_per_scale)) for raw in raws]
    planned = sum(form.num_bytes(raw.shape) for form, raw in zip(forms, raws, strict=True) if form is not None)
    assert planned == matrix.words.nbytes + matrix.scales.nbytes
    for rows in (1, 9, 130):
        x = torch.randn(rows, 512)
        assert_near(OPS.linear(x, kept), x @ exact.T + bias, tolerance=1e-4)


@pytest.mark.parametrize(("rows", "splits"), [(3, 1), (9, 3)])
def test_columns_are_split(rows: int, splits: int) -> None:
    """More splits than there are spans leave some with nothing to do."""
    x, bias, raw = torch.randn(rows, 256), torch.randn(72), table_matrix("NF4", (72, 256), 3, 2)
    found = gemm_table.splitk_table_linear(x, packed(raw), bias, SplitKConfig(64, 128, splits, 2))
    assert_near(found, x @ dequantize(raw).T + bias, tolerance=1e-4)


def test_tables_are_not_mixed() -> None:
    """Neighbours of other tables, or with other groups, are pieces; so is what is looked up or small."""
    raws = [
        table_matrix("NF4", (16, 256), 1, 2),
        table_matrix("FP4", (16, 256), 2, 2),
        table_matrix("IQ4_XS", (16, 256), 3),
    ]
    kept = OPS.pack_linear(raws, None, DENSE)
    assert [piece.packed.quant for piece in kept.packed] == ["NF4", "FP4", "IQ4_XS"]
    x = torch.randn(3, 256)
    assert_near(OPS.linear(x, kept), x @ torch.cat([dequantize(raw) for raw in raws]).T, tolerance=1e-4)
    embedding = OPS.pack_embedding(table_matrix("IQ4_NL", (16, 256), 3, name="embed.weight"), DENSE)
    assert isinstance(embedding.packed, PackedIntMatrix) and embedding.packed.bits == 8


def test_where_picking_is_slow_they_are_what_they_were() -> None:
    def kept(quant: str) -> LinearWeight:
        return OPS.pack_linear([table_matrix(quant, (24, 256), 1)], None, DENSE)

    with patch.object(linear, "keeps_fp4_on", lambda device, dtype: False):
        for quant in ("IQ4_NL", "IQ4_XS"):
            packed, raw = kept(quant).packed, table_matrix(quant, (24, 256), 1)
            assert isinstance(packed, PackedIntMatrix) and packed.bits == 8
            assert_near(quantized.expanded(packed).float(), dequantize(raw), 1e-3)  # scales of 16 bits
        assert all(isinstance(kept(quant).packed, torch.Tensor) for quant in ("NF4", "FP4"))


@pytest.mark.parametrize(("bits", "is_symmetric"), [(4, True), (4, False), (8, True)])
def test_act_order_is_multiplied_in_its_bits(bits: int, is_symmetric: bool) -> None:
    """Neighbours in the same order are one matrix, others pieces."""
    one, other = torch.randperm(512), torch.randperm(512)
    raws = [
        act_order(bits, size, order, is_symmetric=is_symmetric, group=64)
        for size, order in ((24, one), (40, one), (16, other))
    ]
    bias, exact = torch.randn(80), torch.cat([raw.data for raw in raws]).float()
    kept = OPS.pack_linear(raws, bias, DENSE)
    pieces = [piece.packed for piece in kept.packed]
    assert all(isinstance(piece, OrderedMatrix) for piece in pieces)
    assert [len(piece.matrix.words) for piece in pieces] == [64, 16] and pieces[0].matrix.bits == bits
    for rows in (1, 5, 40):
        x = torch.randn(rows, 512)
        assert_near(OPS.linear(x, kept), x @ exact.T + bias, tolerance=2e-3)
    in_groups = quantized.expanded(pieces[1].matrix).float()
    assert_near(in_groups, exact[64:][:, raws[2].ordered.order], 1e-3)
    alone = build_ops(deterministic=True).pack_linear(raws, None, DENSE)
    assert isinstance(alone.packed, torch.Tensor) and torch.equal(alone.packed, exact.bfloat16())
    planned = packed_int_format(
        "a.weight", (16, 512), StoredFormat(str(raws[2].ordered.blocks.quant), 2, is_ordered=True)
    )
    assert planned is not None and planned.num_bytes((16, 512)) == sum(
        part.nbytes for part in (pieces[1].matrix.words, pieces[1].matrix.scales, pieces[1].order)
    )
