"""Gluon knows no interpreter, so without a GPU it is seen what compilers make of the kernel; its results are tested in
tests/gpu/test_kept_formats.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from tokenmill.ops.triton import quantized
from tokenmill.ops.triton.wide_strips import cut_for


def test_weights_enter_the_matrix_units_from_registers(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    places = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": places, "TRITON_CACHE_DIR": str(tmp_path)}
    program = str(Path(__file__).with_name("compiled_wide_strips.py"))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "from registers" in done.stdout


def test_products_are_cut_into_about_as_many_programs_as_run_at_once() -> None:
    gate_up, down, small = (28672, 4096), (4096, 14336), (64, 256)
    for num_rows, at_once in ((64, 396), (128, 264), (200, 264)):
        cut = cut_for(num_rows, *down, 4)
        assert at_once * 3 // 4 < 4096 // cut.strip * cut.splits * -(-num_rows // cut.rows) <= at_once
    assert [cut_for(rows, *gate_up, 4).rows for rows in (33, 64, 65, 129, 256)] == [64, 64, 128, 256, 256]
    assert cut_for(200, *down, 4).rows == 128
    assert cut_for(64, *gate_up, 8).splits == cut_for(33, *small, 4).splits == 1


def test_who_takes_wide_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = quantized.to_int4(torch.randn(16, 256))
    assert not quantized._takes_wide_strips(torch.empty(64, 256, dtype=torch.bfloat16), matrix)
    monkeypatch.setattr(quantized, "can_widen", lambda device: True)
    rows_taken = [
        rows for rows in (1, 32, 33, 512, 513) if quantized._takes_wide_strips(torch.empty(rows, 256).half(), matrix)
    ]
    assert rows_taken == [33, 512]
    assert not quantized._takes_wide_strips(torch.empty(64, 256), matrix)
    assert not quantized._takes_wide_strips(torch.empty(64, 384).half(), quantized.to_int4(torch.randn(16, 384)))
