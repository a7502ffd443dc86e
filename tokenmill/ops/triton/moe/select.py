"""Selection of the kernels for routed experts: one ordered table, by the number of tokens and the form of the matrices.

    a few tokens   each (token, expert) pair streams its expert's matrices: a GEMV
    more tokens    pairs are sorted by expert and multiplied in tiles: a grouped GEMM
    very many      packed matrices are expanded, some experts at a time, before the grouped GEMM

The kernels' callers use the functions here; `tokenmill doctor --kernels` prints the table. Needs no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from tokenmill.arch.packed_formats import EXPANDED_BYTES
from tokenmill.ops.triton.launch.capabilities import Capabilities

ExpertsKind = Literal["plain", "int", "fp4", "fp8_blocks", "mixed"]
"""All matrices unquantised; all packed integers; all MXFP4 or NVFP4; all fp8 with group scales; or a mixture"""


class ExpertsProduct(NamedTuple):
    """The properties of a step's experts that kernel selection uses."""

    num_tokens: int
    num_active: int  # experts per token
    num_experts: int
    kind: ExpertsKind
    expert_bytes: int  # of one expert's matrix, expanded
    is_fused: bool  # together with the preceding norm and router
    capabilities: Capabilities


class ExpertsRow(NamedTuple):
    name: str
    accepts: Callable[[ExpertsProduct], bool]
    why: str


def streams_experts(num_tokens: int, kind: ExpertsKind, gpu: Capabilities, *, is_fused: bool) -> bool:
    """Return whether each pair streams its expert's matrices; packed ones only if norm and router are fused too. For
    fp8 up to half as many tokens, since tiles multiply it without expanding."""
    has_kernel = kind in ("plain", "fp4", "fp8_blocks") or (is_fused and kind == "int")
    most = gpu.tuning.moe_gemv_max_tokens // (2 if kind == "fp8_blocks" else 1)
    return 0 < num_tokens <= most and has_kernel


def num_expanded(num_pairs: int, num_experts: int, expert_bytes: int, gpu: Capabilities, *, is_fp4: bool) -> int:
    """Return how many experts' packed matrices are expanded at a time, an even number; 0: they are multiplied without
    expanding, as 4-bit floats always are by the Hopper kernel."""
    if num_pairs <= gpu.tuning.moe_expand_min_pairs * num_experts or (is_fp4 and gpu.has_gluon):
        return 0
    return min(num_experts, EXPANDED_BYTES // expert_bytes) // 2 * 2


def _is_expanded(product: ExpertsProduct) -> bool:
    num_pairs = product.num_tokens * product.num_active
    gpu, is_fp4 = product.capabilities, product.kind == "fp4"
    count = num_expanded(num_pairs, product.num_experts, product.expert_bytes, gpu, is_fp4=is_fp4)
    return product.kind not in ("plain", "fp8_blocks") and count > 0


EXPERTS: tuple[ExpertsRow, ...] = (
    ExpertsRow(
        "moe_gemv",
        lambda p: streams_experts(p.num_tokens, p.kind, p.capabilities, is_fused=p.is_fused),
        "few tokens: each (token, expert) pair streams its expert's matrices",
    ),
    ExpertsRow(
        "expand_grouped_gemm",
        _is_expanded,
        "very many tokens per expert: packed matrices are expanded, some experts at a time",
    ),
    ExpertsRow(
        "grouped_gemm_fp4",
        lambda p: p.kind == "fp4",
        "pairs sorted by expert, 4-bit values expanded in registers, gated activation fused",
    ),
    ExpertsRow(
        "grouped_gemm_fp8",
        lambda p: p.kind == "fp8_blocks",
        "pairs sorted by expert, quantised to fp8, sums of 128 columns times their scales, gated activation fused",
    ),
    ExpertsRow(
        "grouped_gemm_int",
        lambda p: p.kind != "plain",
        "pairs sorted by expert, integers expanded in registers",
    ),
    ExpertsRow("grouped_gemm", lambda p: True, "pairs sorted by expert, multiplied in tiles"),
)


def choose_experts(product: ExpertsProduct) -> ExpertsRow:
    return next(row for row in EXPERTS if row.accepts(product))
