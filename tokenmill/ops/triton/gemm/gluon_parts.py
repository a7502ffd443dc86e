"""What kernels in Gluon, Triton's lower language, have in common. They can't call Triton's functions: these are the
twins of some in `overlap` and `strips`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Triton 3.6's names, and later ones'.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copy_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def launch_dependents(OVERLAPS: gl.constexpr):
    if OVERLAPS:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_previous(OVERLAPS: gl.constexpr):
    if OVERLAPS:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def new_barriers(NUM: gl.constexpr):
    """One for each tile of a ring, which tells that it was copied; all threads can use them from here on"""
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=1)
    fence_async_shared()
    barrier()
    return barriers


@gluon.jit
def join_splits(sums, parts, arrived, splits, STRIP: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr):
    """All splits' sums for the program that comes last, which `is_last` tells; its own for the others"""
    lines = gl.expand_dims(gl.arange(0, STRIP, layout=gl.SliceLayout(1, SUMS)), 1)
    tile = lines * ROWS + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS)), 0)
    place = gl.program_id(0) + gl.program_id(2) * gl.num_programs(0)
    first = parts + place.to(gl.int64) * splits * (STRIP * ROWS) + tile
    gl.store(first + gl.program_id(1) * (STRIP * ROWS), sums)
    barrier()
    is_last = gl.atomic_add(arrived + place, 1, sem="acq_rel") == splits - 1
    if is_last:
        gl.store(arrived + place, 0)
        sums = gl.zeros((STRIP, ROWS), gl.float32, layout=SUMS)
        for split in range(splits):
            sums += gl.load(first + split * (STRIP * ROWS), cache_modifier=".cg")
    return sums, is_last


@gluon.jit
def store_lines(sums, out, begin, row, num_rows, num_out, LINES: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """sums [LINES, ROWS] to out [rows, lines]: neighbouring lines by one thread"""
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [LINES // 8, 256 // LINES], [1, WARPS], [0, 1])
    lines = gl.expand_dims(begin + gl.arange(0, LINES, layout=gl.SliceLayout(1, OUT)), 1)
    rows = gl.expand_dims(row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT)), 0)
    result = gl.convert_layout(sums.to(out.dtype.element_ty), OUT)
    gl.store(out + rows.to(gl.int64) * num_out + lines, result, mask=(rows < num_rows) & (lines < num_out))
