"""Gluon knows no interpreter, so without a GPU it is seen what compilers make of its kernels; their results are tested
in tests/gpu/test_kept_formats.py and test_hopper_gemm.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from tokenmill.ops.triton.gemm.hopper import pick_hopper_config
from tokenmill.ops.triton.gemm.product import FP8, PLAIN, Epilogue, Product, WeightForm, int_form
from tokenmill.ops.triton.launch.capabilities import named_gpu
from tokenmill.ops.triton.quant.hopper_gemm_int import HopperIntConfig, pick_hopper_int_config

H200 = named_gpu("H200")


def test_how_matrices_enter_the_matrix_units(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    places = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": places, "TRITON_CACHE_DIR": str(tmp_path)}
    program = str(Path(root) / "tests" / "support" / "compiled_for_hopper.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "as they should" in done.stdout


def product(m: int, n: int, k: int, form: WeightForm, epilogue: Epilogue = "none") -> Product:
    return Product(m, n, k, form, H200, "captured", epilogue)


def test_products_are_cut_into_about_as_many_programs_as_run_at_once() -> None:
    def config(m: int, shape: tuple[int, int], bits: int = 4) -> HopperIntConfig:
        return pick_hopper_int_config(product(m, *shape, int_form(torch.bfloat16, bits, 32)))

    gate_up, down, small = (28672, 4096), (4096, 14336), (64, 256)
    for num_rows, at_once in ((64, 396), (128, 264), (200, 264)):
        cut = config(num_rows, down)
        assert at_once * 3 // 4 < 4096 // cut.tile_n * cut.splits * -(-num_rows // cut.rows) <= at_once
    assert [config(rows, gate_up).rows for rows in (33, 64, 65, 129, 256)] == [64, 64, 128, 256, 256]
    assert config(200, down).rows == 128
    assert config(64, gate_up, 8).splits == config(33, small).splits == 1


def test_matrices_are_split_where_they_have_many_columns_and_few_rows() -> None:
    bf16, fp8 = PLAIN[torch.bfloat16], FP8[torch.bfloat16]
    assert all(pick_hopper_config(product(128, 4096, 14336, form)).splits == 2 for form in (bf16, fp8))
    for num_rows in (4096, 6144, 128256):
        assert pick_hopper_config(product(64, num_rows, 4096, bf16)).splits == 1
    for rows in (64, 128):
        for epilogue in ("gated", "none"):
            made = pick_hopper_config(product(rows, 28672, 4096, bf16, epilogue))
            assert made.rows == rows and (made.tile_n + rows) * 128 * made.ring <= 200 * 1024


def test_a_rank_s_part_of_a_matrix_gives_most_multiprocessors_something_to_do() -> None:
    """The matrices are those of one of eight ranks of a 70B model."""
    bf16 = PLAIN[torch.bfloat16]
    parts: list[tuple[int, Epilogue]] = [(1280, "none"), (1024, "none"), (7168, "gated")]
    for rows in (64, 128):
        for num_out, epilogue in parts:
            made = pick_hopper_config(product(rows, num_out, 8192, bf16, epilogue))
            assert 100 <= -(-num_out // made.tile_n) * made.splits <= 132
