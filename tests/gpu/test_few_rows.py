"""What few rows are computed with on a real GPU, on shapes of large models: the same as one plain op after another."""

from __future__ import annotations

import pytest
import torch

from tokenmill.arch.spec import MlpSpec, MoeSpec, RoutingSpec
from tokenmill.ops.batch import ForwardBatch, GroupTables, LayerCache
from tokenmill.ops.interface import AttentionArgs, ExpertsWeight, LinearWeight, Routing
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN
from tokenmill.ops.reference.kv_rounding import rounded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
HEADS, DIM, BLOCK = 32, 128, 16


def near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    error = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    assert error < tolerance, error


def caches_of(num_blocks: int, kv_heads: int, dtype: torch.dtype) -> list[LayerCache]:
    """Two that are alike"""
    vectors = torch.randn(2, num_blocks, kv_heads, BLOCK, DIM, device="cuda")
    if dtype == torch.bfloat16:
        keys, values = vectors.to(dtype)
        return [LayerCache(keys.clone(), values.clone()) for _ in range(2)]
    numbers, scales = rounded(vectors, dtype)
    return [LayerCache(*numbers.clone(), *scales.clone()) for _ in range(2)]


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "window"),
    [(4, torch.bfloat16, None), (8, torch.bfloat16, 100), (8, torch.int8, None)],
)
@pytest.mark.parametrize("contexts", [[1], [65], [300], [5000], [0, 700, 2049], [64, 1, 1300, 128]])
def test_placing_and_attending_at_once(
    contexts: list[int], kv_heads: int, dtype: torch.dtype, window: int | None
) -> None:
    from tokenmill.ops.triton.attention.decode import fused_decode_attention
    from tokenmill.ops.triton.attention.kv_cache import norm_rope_write_kv
    from tokenmill.ops.triton.attention.select import takes_fused_decode
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.launch.capabilities import capabilities_of

    torch.manual_seed(0)
    ops, num_rows, width = build_ops(), len(contexts), max(contexts) // BLOCK + 1
    tables = (torch.randperm(num_rows * width, device="cuda") + 1).int().view(num_rows, width)
    ours, theirs = caches_of(1 + tables.numel(), kv_heads, dtype)
    lengths = torch.tensor(contexts, device="cuda", dtype=torch.int32)
    newest = (lengths.long() - 1).clamp(min=0)
    slots = tables.long().gather(1, (newest // BLOCK).unsqueeze(1)).squeeze(1) * BLOCK + newest % BLOCK
    qkv = torch.randn(num_rows, (HEADS + 2 * kv_heads) * DIM, device="cuda", dtype=torch.bfloat16)
    norms = (torch.rand(DIM, device="cuda") + 0.5, torch.rand(DIM, device="cuda") + 0.5)
    angles = (torch.randn(num_rows, DIM // 2, device="cuda"), torch.randn(num_rows, DIM // 2, device="cuda"))
    starts = torch.arange(num_rows + 1, device="cuda").int()
    batch = ForwardBatch(
        newest, newest, starts, lengths, (GroupTables(tables, slots),), newest, BLOCK, 1, 8192, num_rows
    )
    plan, args = ops.plan_attention(batch, 0, None), AttentionArgs(DIM**-0.5, window)
    assert takes_fused_decode(num_rows, kv_heads, DIM, plan.max_context, capabilities_of(qkv.device))
    for _ in range(2):  # counters are set back
        found = fused_decode_attention(qkv, ours, norms, 1e-6, angles, plan, args)
    is_row = lengths > 0
    assert not found[~is_row].any()
    queries = norm_rope_write_kv(qkv, theirs, torch.where(is_row, slots, 0), norms, 1e-6, angles)
    expected = ops.attention(queries, theirs, plan, args)
    near(found[is_row], expected[is_row], 0.005 if dtype == torch.bfloat16 else 0.02)
    near(ours.keys[1:].float(), theirs.keys[1:].float(), 1e-3)
    near(ours.values[1:].float(), theirs.values[1:].float(), 1e-3)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "hidden", "inter", "k"),
    [(1, 128, 2048, 768, 8), (4, 60, 1536, 1408, 2), (2, 128, 4096, 768, 8), (1, 16, 2048, 1408, 1)],
)
def test_experts_of_few_tokens(num_tokens: int, num_experts: int, hidden: int, inter: int, k: int) -> None:
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.elementwise.norm import norm_and_multiply
    from tokenmill.ops.triton.moe.gemv import add_norm_experts

    def drawn(*shape: int, scale: float = 0.02) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale

    torch.manual_seed(0)
    ops, x, residual = build_ops(), drawn(num_tokens, hidden, scale=1.0), drawn(num_tokens, hidden, scale=1.0)
    norm, router = torch.rand(hidden, device="cuda") + 0.5, drawn(num_experts, hidden, scale=0.05)
    packed = ExpertsWeight(num_experts, (drawn(num_experts, 2 * inter, hidden), drawn(num_experts, hidden, inter)))
    spec = MoeSpec(num_experts, k, MlpSpec(inter, "silu"), RoutingSpec(renormalize=k > 2))
    done = add_norm_experts(
        x, residual, norm, 1e-6, LinearWeight(num_experts, hidden, router), packed, Routing(k, spec.routing), "silu"
    )
    logits, normed, total = norm_and_multiply(x, residual, norm, 1e-6, router)
    chosen = ops.route(logits, Routing(k, spec.routing))  # of equal logits the first, as here
    exact = ExpertsWeight(num_experts, tuple(part.float() for part in packed.packed))
    near(done.result, PLAIN.experts(normed.float(), *chosen, exact, "silu"), 0.01)
    assert torch.equal(done.total, total)


@pytest.mark.parametrize(
    ("num_experts", "num_shared", "hidden", "inter", "k", "renormalize"),
    [
        (64, 2, 2048, 1408, 6, False),
        (60, 1, 1024, 512, 4, True),
        (128, 1, 2048, 768, 8, True),
        (8, 4, 1024, 640, 2, True),
    ],
)
def test_experts_of_one_token_through_a_ring(
    num_experts: int, num_shared: int, hidden: int, inter: int, k: int, renormalize: bool
) -> None:
    """Also in a graph, whose kernels begin before the one ahead of them has ended."""
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.launch.capabilities import capabilities_of
    from tokenmill.ops.triton.moe.gemv import moe_gemv
    from tokenmill.ops.triton.moe.select import ExpertsSizes, takes_ring

    sizes = ExpertsSizes(num_shared, num_experts, k, hidden, inter)
    if not takes_ring(1, sizes, capabilities_of(torch.device("cuda"))):
        pytest.skip("this GPU streams experts otherwise")
    torch.manual_seed(0)
    total = num_experts + num_shared
    matrices = [torch.randn(total, *shape, device="cuda") * 0.03 for shape in ((2 * inter, hidden), (hidden, inter))]
    packed = ExpertsWeight(total, tuple(matrix.bfloat16() for matrix in matrices), num_shared=num_shared)
    exact = ExpertsWeight(total, tuple(part.float() for part in packed.packed))
    ops, routing = build_ops(), Routing(k, RoutingSpec(renormalize=renormalize))
    x, logits = torch.empty(1, hidden, device="cuda").bfloat16(), torch.empty(1, num_experts, device="cuda").bfloat16()

    def run() -> list[torch.Tensor]:
        results = [moe_gemv(x, logits, packed, k, "silu", renormalize=renormalize)]
        return [*results, moe_gemv(results[0], logits, packed, k, "silu", renormalize=renormalize)]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for number in range(20):
        x.copy_(torch.randn(1, hidden))
        logits.copy_(torch.randn(1, num_experts) if number else torch.zeros(1, num_experts))
        graph.replay()
        weights, ids = ops.route(logits, routing)  # of equal logits the first, as here
        weights = torch.cat((weights, torch.ones(1, num_shared, device="cuda")), dim=1)
        ids = torch.cat((ids, torch.arange(num_experts, total, device="cuda")[None]), dim=1)
        for given, result in zip((x, results[0]), results, strict=True):
            near(result, PLAIN.experts(given.float(), weights, ids, exact, "silu"), 0.01)
