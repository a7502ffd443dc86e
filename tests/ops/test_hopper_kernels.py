"""Gluon knows no interpreter, so without a GPU it is seen what compilers make of its kernels; their results are tested
in tests/gpu/test_kept_formats.py and test_wide_products.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from tokenmill.ops.triton.gemm import epilogues, hopper_select, linear
from tokenmill.ops.triton.quant import quantized
from tokenmill.ops.triton.quant.hopper_gemm_int import pick_hopper_int_config


def test_how_matrices_enter_the_matrix_units(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    places = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": places, "TRITON_CACHE_DIR": str(tmp_path)}
    program = str(Path(root) / "tests" / "support" / "compiled_for_hopper.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "as they should" in done.stdout


def test_products_are_cut_into_about_as_many_programs_as_run_at_once() -> None:
    gate_up, down, small = (28672, 4096), (4096, 14336), (64, 256)
    for num_rows, at_once in ((64, 396), (128, 264), (200, 264)):
        cut = pick_hopper_int_config(num_rows, *down, 4)
        assert at_once * 3 // 4 < 4096 // cut.strip * cut.splits * -(-num_rows // cut.rows) <= at_once
    assert [pick_hopper_int_config(rows, *gate_up, 4).rows for rows in (33, 64, 65, 129, 256)] == [
        64,
        64,
        128,
        256,
        256,
    ]
    assert pick_hopper_int_config(200, *down, 4).rows == 128
    assert pick_hopper_int_config(64, *gate_up, 8).splits == pick_hopper_int_config(33, *small, 4).splits == 1


def test_who_takes_wide_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = quantized.to_int4(torch.randn(16, 256))
    assert not quantized._takes_hopper_gemm_int(torch.empty(64, 256, dtype=torch.bfloat16), matrix)
    monkeypatch.setattr(quantized, "has_gluon", lambda device: True)
    rows_taken = [
        rows
        for rows in (1, 32, 33, 512, 513)
        if quantized._takes_hopper_gemm_int(torch.empty(rows, 256).half(), matrix)
    ]
    assert rows_taken == [33, 512]
    assert not quantized._takes_hopper_gemm_int(torch.empty(64, 256), matrix)
    assert not quantized._takes_hopper_gemm_int(torch.empty(64, 384).half(), quantized.to_int4(torch.randn(16, 384)))


def test_who_takes_wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.empty(4096, 1024, dtype=torch.bfloat16)
    on_cpu = torch.empty(64, 1024, dtype=torch.bfloat16)
    assert not hopper_select.takes_hopper_gemm(on_cpu, matrix, "captured")
    monkeypatch.setattr(hopper_select, "has_gluon", lambda device: True)
    for dtype, rows, columns, is_wide in (
        (torch.bfloat16, 32, 1024, False),
        (torch.bfloat16, 33, 1024, True),
        (torch.float8_e4m3fn, 128, 1024, True),
        (torch.bfloat16, 129, 1024, False),
        (torch.float32, 64, 1024, False),
        (torch.bfloat16, 64, 1028, False),  # rows are no whole 16 bytes
    ):
        x, matrix = torch.empty(rows, columns, dtype=dtype), torch.empty(8, columns, dtype=dtype)
        assert not hopper_select.takes_hopper_gemm(x, matrix, "eager")
        assert hopper_select.takes_hopper_gemm(x, matrix, "captured") == is_wide
    called = []
    monkeypatch.setattr(linear, "hopper_linear", lambda x, *args, **options: called.append(options) or x)
    monkeypatch.setattr(epilogues, "hopper_linear", linear.hopper_linear)
    weight = linear._whole(torch.empty(16, 1024, dtype=torch.bfloat16))
    linear.linear(on_cpu, weight, "captured")
    epilogues.gated_linear(on_cpu, weight, "silu", "captured")
    assert called == [{}, {"activation": "silu"}]


def test_wide_products_are_split_where_a_matrix_has_many_columns_and_few_lines() -> None:
    cut = hopper_select.pick_hopper_config
    assert cut(128, 4096, 14336, 2, is_gated=False).splits == cut(128, 4096, 14336, 1, is_gated=False).splits == 2
    for lines in (4096, 6144, 128256):
        assert cut(64, lines, 4096, 2, is_gated=False).splits == 1
    for rows in (64, 128):
        for is_gated in (True, False):
            made = cut(rows, 28672, 4096, 2, is_gated=is_gated)
            assert made.rows == rows and (made.lines + rows) * 128 * made.ring <= 200 * 1024
