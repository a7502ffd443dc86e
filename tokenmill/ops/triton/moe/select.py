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


class ExpertsSizes(NamedTuple):
    num_shared: int  # shared experts that are appended to the routed ones
    num_experts: int
    num_active: int
    hidden: int
    inter: int


class ExpertsProduct(NamedTuple):
    """The properties of a step's experts that kernel selection uses."""

    num_tokens: int
    num_active: int  # experts per token
    num_experts: int
    kind: ExpertsKind
    expert_bytes: int  # of one expert's matrix, expanded
    is_fused: bool  # together with the preceding norm and router
    capabilities: Capabilities
    sizes: ExpertsSizes | None = None


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


MAX_RING_HIDDEN = 2048  # more columns leave room for few chunks
MAX_CHOICE_BITS = 63  # of a token's experts in one integer


def takes_ring(num_tokens: int, sizes: ExpertsSizes, gpu: Capabilities) -> bool:
    """Return whether the experts' matrices are streamed through shared memory: for one token, and with shared experts,
    which are asked for while attention is computed. Otherwise this is slower than streaming into registers: 2.41
    instead of 2.17 ms a step of Qwen3-30B-A3B's shape on an H200, but 1.60 instead of 1.69 of DeepSeek-V2-Lite's."""
    is_laid_out = sizes.hidden in (1024, MAX_RING_HIDDEN) and sizes.inter % 128 == 0 and sizes.inter >= 512
    num_bits = sizes.num_active * max(6, (sizes.num_experts - 1).bit_length())
    return gpu.has_gluon and num_tokens == 1 and sizes.num_shared > 0 and is_laid_out and num_bits <= MAX_CHOICE_BITS


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
        "ring_experts",
        lambda p: p.kind == "plain" and p.sizes is not None and takes_ring(p.num_tokens, p.sizes, p.capabilities),
        "one token: matrices stream through shared memory, shared experts' while attention is computed",
    ),
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
