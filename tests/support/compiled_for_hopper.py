"""What compilers produce from the Gluon kernels for Hopper; runs on any machine. It is a separate program, since a
process that used Gluon's builders under pytest reports errors when it exits."""

from __future__ import annotations

import re
from typing import Any

import torch
from triton import compile as compiled_for
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tokenmill.arch.packed_formats import MX_GROUP, NV_GROUP
from tokenmill.ops.triton.gemm.hopper import TILES, _hopper_gemm, pick_grouped_config, pick_hopper_config
from tokenmill.ops.triton.gemm.product import FP8, NVFP4, PLAIN, TABLE_FORMS, Product, int_form
from tokenmill.ops.triton.launch.capabilities import named_gpu
from tokenmill.ops.triton.launch.kernel import FUSED, Kernel
from tokenmill.ops.triton.moe.hopper_fp4 import TILES as FP4_TILES
from tokenmill.ops.triton.moe.hopper_fp4 import _hopper_grouped_fp4, pick_hopper_fp4_config
from tokenmill.ops.triton.moe.hopper_gemv import CHUNKS, SLICES, _ring_down, _ring_up
from tokenmill.ops.triton.quant.hopper_gemm_fp4 import TILES as DENSE_FP4_TILES
from tokenmill.ops.triton.quant.hopper_gemm_fp4 import DenseFp4Config, _hopper_gemm_fp4, pick_dense_fp4_config
from tokenmill.ops.triton.quant.hopper_gemm_int import TILES as STRIP_TILES
from tokenmill.ops.triton.quant.hopper_gemm_int import _hopper_gemm_int, pick_hopper_int_config

H200 = named_gpu("H200")
SHARED = 227 * 1024  # shared memory of a program on Hopper, at most
POINTERS = {"bias": "*bf16", "out": "*bf16", "parts": "*fp32", "arrived": "*i32"}
NUMBERS = ("num_rows", "num_out", "num_in", "splits")


def made(kernel: Kernel, types: dict[str, str], constants: dict[str, Any], warps: int) -> Any:
    jitted, pointers = kernel._jitted, [name for name, kind in types.items() if kind.startswith("*")]
    names = jitted.arg_names
    source = GluonASTSource(
        fn=jitted,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in (*pointers, "num_out", "num_in")
            if name in names
        },
    )
    options = FUSED | {"num_warps": warps, "launch_pdl": True}
    compiled = compiled_for(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= SHARED
    return compiled


def left_factors(compiled: Any, shape: str) -> list[str]:
    """Return where the left operand of each product is: registers in braces, or the address of a tile."""
    return re.findall(rf"wgmma\.mma_async\S*{shape}\S* \{{[^}}]*\}}, (\S)", compiled.asm["ptx"])


def check_strips(rows: int, bits: int, group: int, scales: str) -> None:
    cut = pick_hopper_int_config(Product(rows, 28672, 4096, int_form(torch.bfloat16, bits, 32), H200))
    inputs = f"tensordesc<bf16[{cut.rows},64],{STRIP_TILES!r}>"
    types = {"x": inputs, "weight": "*i32", **POINTERS, "scales": scales} | dict.fromkeys(NUMBERS, "i32")
    constants = {
        "ROWS": cut.rows, "TILE_N": cut.tile_n, "RING": cut.ring, "WARPS": cut.warps,
        "AHEAD": cut.ahead, "HAS_BIAS": True, "GROUP": group, "BITS": bits, "OVERLAPS": True,
    }  # fmt: skip
    factors = left_factors(made(_hopper_gemm_int, types, constants, cut.warps), f"m64n{cut.rows}k16")
    assert len(factors) == 32 // bits * 2 and set(factors) == {"{"}, "weights do not come from registers"


def check_products(num_rows: int, element: str, columns: int, activation: str, scaled: str = "") -> None:
    form = (PLAIN if columns == 64 else FP8)[torch.bfloat16]
    pick = pick_grouped_config if scaled == "groups" else pick_hopper_config
    cut = pick(Product(num_rows, 4096, 4096, form, H200, "captured", "gated" if activation else "none"))
    own = cut.tile_n // 2 if activation else cut.tile_n
    tiles = TILES[128 // columns]
    descriptors = {
        "x": f"tensordesc<{element}[{cut.rows},{columns}],{tiles!r}>",
        "matrix": f"tensordesc<{element}[{own},{columns}],{tiles!r}>",
    }
    scales = {"row_scales": "*fp32", "scales": "*fp32"}
    constants = {
        "ROWS": cut.rows, "TILE_N": cut.tile_n, "COLUMNS": columns, "RING": cut.ring, "WARPS": cut.warps,
        "KIND": activation, "SCALES": scaled, "PLANES": cut.num_planes, "HAS_BIAS": True, "IS_MERGED": cut.is_merged,
        "OVERLAPS": True,
    }  # fmt: skip
    types = descriptors | scales | POINTERS | dict.fromkeys(NUMBERS, "i32")
    compiled = made(_hopper_gemm, types, constants, cut.warps)
    factors = left_factors(compiled, f"m64n{cut.rows}k{columns // 4}")
    assert len(factors) == cut.tile_n // 64 * 4 and "{" not in factors, "the matrix does not come from its tiles"
    asked_before = compiled.asm["ptx"].split("griddepcontrol.wait")[0].count("cp.async.bulk.tensor")
    assert asked_before == (cut.ring - 1) * cut.tile_n // own, "the matrix is not asked for early"


def check_fp4(rows: int, group: int) -> None:
    """Require that a thread reads 16 bytes of a row at a time, and that weights are not moved between threads."""
    cut = pick_dense_fp4_config(Product(rows, 28672, 4096, NVFP4[torch.bfloat16], H200))
    types = {"weight": "*i16", **POINTERS, "scales": "*u8", "factors": "*fp32"}
    check_dense_4_bits(cut, types, group, has_table=False)


def check_dense_4_bits(cut: DenseFp4Config, types: dict[str, str], group: int, *, has_table: bool) -> None:
    types = {**types, "x": f"tensordesc<bf16[{cut.rows},64],{DENSE_FP4_TILES!r}>"}
    types |= dict.fromkeys(("num_rows", "num_out", "num_spans", "splits"), "i32")
    constants = {
        "ROWS": cut.rows, "TILE_N": cut.tile_n, "RING": cut.ring, "WARPS": cut.warps, "AHEAD": cut.ahead,
        "HAS_BIAS": True, "GROUP": group, "HAS_TABLE": has_table, "OVERLAPS": True,
    }  # fmt: skip
    compiled = made(_hopper_gemm_fp4, types, constants, cut.warps)
    factors = left_factors(compiled, f"m64n{cut.rows}k16")
    assert len(factors) == 8 * cut.ahead * cut.tile_n // (16 * cut.warps) and set(factors) == {"{"}
    assert "ld.global.v4.b32" in compiled.asm["ptx"]


def check_table(rows: int, group: int, scales: str) -> None:
    """Require the same of quantised values that are indices into a table."""
    cut = pick_dense_fp4_config(Product(rows, 28672, 4096, TABLE_FORMS["NF4", torch.bfloat16], H200))
    types = {"weight": "*i16", **POINTERS, "scales": scales, "factors": "*i32"}
    check_dense_4_bits(cut, types, group, has_table=True)


def check_experts(pairs_each: int, activation: str, group: int = MX_GROUP) -> None:
    cut = pick_hopper_fp4_config(pairs_each)
    inputs = f"tensordesc<bf16[{cut.rows},64],{FP4_TILES!r}>"
    types = {"x": inputs, "words": "*i16", "scales": "*i32", "factors": "*fp32", "bias": "*bf16", "out": "*bf16"}
    types |= {"order": "*i64", "offsets": "*i64", "weights": "*fp32"}
    types |= dict.fromkeys(("num_out", "num_in", "num_experts", "scale_stride"), "i32")
    constants = {
        "ROWS": cut.rows, "TILE_N": cut.tile_n, "RING": cut.ring, "WARPS": cut.warps, "AHEAD": cut.ahead,
        "KIND": activation, "IS_SHARED_OUT": not activation, "HAS_BIAS": True, "GROUP": group,
    }  # fmt: skip
    factors = left_factors(made(_hopper_grouped_fp4, types, constants, cut.warps), f"m64n{cut.rows}k16")
    assert len(factors) == 4 * cut.ahead * cut.tile_n // (16 * cut.warps), "a chunk is four products"
    assert set(factors) == {"{"}, "weights do not come from registers"


def check_ring() -> None:
    """Require that shared experts are asked for before the router's result is there, a chunk by one instruction."""
    common: dict[str, Any] = {"ACTIVE": 6, "SHARED": 2, "EXPERTS": 64, "BLOCK": 64, "BITS": 6, "RENORMALIZE": False}
    common |= {"INTER": 1408, "PROGRAMS": 132, "OVERLAPS": True}
    pointers = {"x": "*bf16", "inner": "*bf16", "logits": "*bf16", "num_experts": "i32"}
    chunks = f"tensordesc<bf16[8,8,256],{CHUNKS!r}>"
    lines = {"LINES": 8, "LINE": 256, "SLICE": SLICES[256], "SLOTS": 6, "KIND": "silu"}
    compiled = made(_ring_up, pointers | {"gate_up": chunks}, common | lines, 8)
    before, after = compiled.asm["ptx"].split("griddepcontrol.wait")
    assert (before.count("cp.async.bulk.tensor"), after.count("cp.async.bulk.tensor")) == (6, 8)
    chunks = f"tensordesc<bf16[8,16,128],{CHUNKS!r}>"
    lines = {"LINES": 16, "LINE": 128, "SLICE": SLICES[128], "SLOTS": 5, "HIDDEN": 2048}
    pointers = {"inner": "*bf16", "logits": "*bf16", "out": "*bf16", "num_experts": "i32"}
    compiled = made(_ring_down, pointers | {"down": chunks}, common | lines, 8)
    assert compiled.asm["ptx"].split("griddepcontrol.wait")[0].count("cp.async.bulk.tensor") == 5


if __name__ == "__main__":
    check_ring()
    check_experts(16, "swiglu_oai")
    check_experts(16, "silu_to_10")
    check_experts(200, "")
    check_experts(16, "silu", NV_GROUP)
    check_experts(200, "", NV_GROUP)
    check_fp4(16, MX_GROUP)
    check_fp4(128, NV_GROUP)
    check_table(16, 64, "*fp32")
    check_table(128, 32, "*fp16")
    check_strips(64, 8, 16, "*fp16")
    check_strips(128, 4, 32, "*i32")
    check_products(128, "bf16", 64, "silu")
    check_products(64, "fp8e4nv", 128, "", "rows")
    check_products(128, "fp8e4nv", 128, "", "groups")
    check_products(20, "fp8e4nv", 128, "", "groups")
    print("matrices enter the matrix units as they should")
