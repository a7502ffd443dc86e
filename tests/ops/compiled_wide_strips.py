"""What compilers make of the kernel of wide strips for Hopper, on any machine. A program of its own: Gluon's builders
complain at the end of a process that had them under pytest."""

from __future__ import annotations

import re

from triton import compile as compiled_for
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tokenmill.ops.triton.kernel import FUSED
from tokenmill.ops.triton.wide_strips import TILES, _wide_strips, cut_for

SHARED = 227 * 1024  # a program's at most on Hopper
POINTERS = {"weight": "*i32", "bias": "*bf16", "out": "*bf16", "parts": "*fp32", "arrived": "*i32"}
NUMBERS = ("num_rows", "num_out", "num_in", "splits")


def check(rows: int, bits: int, group: int, scales: str) -> None:
    cut = cut_for(rows, 28672, 4096, bits)
    inputs = f"tensordesc<bf16[{cut.rows},64],{TILES!r}>"
    types = {"x": inputs, **POINTERS, "scales": scales} | dict.fromkeys(NUMBERS, "i32")
    constants = {
        "ROWS": cut.rows, "STRIP": cut.strip, "RING": cut.ring, "WARPS": cut.warps,
        "AHEAD": cut.ahead, "HAS_BIAS": True, "GROUP": group, "BITS": bits, "OVERLAPS": True,
    }  # fmt: skip
    kernel = _wide_strips._jitted
    names = kernel.arg_names
    source = GluonASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in (*POINTERS, "scales", "num_out", "num_in")},
    )
    options = FUSED | {"num_warps": cut.warps, "launch_pdl": True}
    made = compiled_for(source, target=GPUTarget("cuda", 90, 32), options=options)
    left_factors = re.findall(rf"wgmma\.mma_async\S*m64n{cut.rows}k16\S* \{{[^}}]*\}}, (\S)", made.asm["ptx"])
    assert len(left_factors) == 32 // bits * 2 and set(left_factors) == {"{"}, "weights do not come from registers"
    assert made.metadata.shared <= SHARED


if __name__ == "__main__":
    check(64, 8, 16, "*fp16")
    check(128, 4, 32, "*i32")
    print("weights enter the matrix units from registers")
