"""`--deterministic` on a real GPU: bit for bit the same in any company, in bfloat16 on the shapes of an 8B model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import VOCAB, make_reference
from tokenmill import LLM, SamplingParams
from tokenmill.ops.batch import ForwardBatch, GroupTables, LayerCache
from tokenmill.ops.interface import AttentionArgs, ExpertsWeight, LinearWeight
from tokenmill.ops.reference.kv_rounding import rounded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
KV_HEADS, HEADS, DIM, BLOCK = 8, 32, 128, 16


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128, 2048)])
def test_a_row_s_product_does_not_depend_on_the_others(shape: tuple[int, int]) -> None:
    from tokenmill.ops.triton.gemm.deterministic import deterministic_linear

    weight = LinearWeight(*shape, normal(*shape) * 0.02)
    x = normal(3000, shape[1])
    together = deterministic_linear(x, weight)
    exact = x.float() @ weight.packed.float().T
    assert float((together.float() - exact).norm() / exact.norm()) < 0.01
    for first, count in ((0, 1), (7, 2), (100, 16), (40, 17), (11, 33), (500, 64), (9, 100), (1, 130), (0, 900)):
        alone = deterministic_linear(x[first : first + count], weight)
        assert torch.equal(alone, together[first : first + count]), count


def cache_of(context: int, dtype: torch.dtype) -> LayerCache:
    keys, values = normal(2, context // BLOCK + 2, KV_HEADS, BLOCK, DIM)
    if dtype == torch.bfloat16:
        return LayerCache(keys, values)
    (keys, key_scales), (values, value_scales) = rounded(keys, dtype), rounded(values, dtype)
    return LayerCache(keys, values, key_scales, value_scales)


def attended(queries: torch.Tensor, cache: LayerCache, rows: list[tuple[int, int]], **how: bool) -> torch.Tensor:
    """rows: (queries, context) each, all over the same blocks"""
    from tokenmill.ops.triton.attention.deterministic import deterministic_attention
    from tokenmill.ops.triton.attention.plan import plan_attention

    counts = torch.tensor([count for count, _ in rows], device="cuda")
    contexts = torch.tensor([context for _, context in rows], device="cuda").int()
    longest = int(contexts.max())
    table = torch.arange(1, longest // BLOCK + 2, device="cuda").int().repeat(len(rows), 1)
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    starts = torch.cat((torch.zeros(1, device="cuda"), counts.cumsum(0))).int()
    batch = ForwardBatch(
        none, none, starts, contexts, (GroupTables(table, none),), none, BLOCK, int(counts.max()), longest
    )
    return deterministic_attention(queries, cache, plan_attention(batch, 0, None), AttentionArgs(DIM**-0.5), **how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_query_s_attention_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    cache, queries = cache_of(1500, dtype), normal(1500, HEADS, DIM)
    whole = attended(queries, cache, [(1500, 1500)])
    for first, last in ((0, 700), (700, 733), (733, 1500), (1499, 1500)):
        part = attended(queries[first:last], cache, [(last - first, last)])
        assert torch.equal(part, whole[first:last]), (first, last)
    chosen = list(range(3, 1500, 11))
    rows = [(1, position + 1) for position in chosen]
    for in_turn in (True, False):
        assert torch.equal(attended(queries[chosen], cache, rows, in_turn=in_turn), whole[chosen])


def test_an_expert_s_answer_does_not_depend_on_the_others() -> None:
    from tokenmill.ops.triton.moe.grouped_gemm import deterministic_experts

    packed = ExpertsWeight(64, (normal(64, 1536, 2048) * 0.02, normal(64, 2048, 768) * 0.02))
    x = normal(900, 2048)
    weights, ids = torch.rand(900, 64, device="cuda").topk(8)
    together = deterministic_experts(x, weights, ids, packed, "silu")
    for rows in (slice(0, 1), slice(5, 12), slice(100, 400)):
        assert torch.equal(deterministic_experts(x[rows], weights[rows], ids[rows], packed, "silu"), together[rows])


def mixed_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 3, 17, 40, 90)))] for _ in range(count)]
    params = [
        SamplingParams(
            temperature=rng.choice((0.0, 0.0, 0.9)), top_p=rng.choice((1.0, 0.9)), seed=number, ignore_eos=True,
            max_tokens=rng.randint(4, 60), repetition_penalty=rng.choice((1.0, 1.1)),
        )
        for number in range(count)
    ]  # fmt: skip
    return prompts, params


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_requests_get_the_same_tokens_alone_and_together(family: str, kv_dtype: str, tmp_path: Path) -> None:
    """Together they are cut into chunks and preempted: a pool of 60 blocks does not hold them all."""
    make_reference(family).save_pretrained(tmp_path)
    prompts, params = mixed_requests(40)

    def answers(num_rows: int) -> list[list[int]]:
        llm = LLM(
            str(tmp_path), device="cuda", dtype="bfloat16", max_context=160, max_running=num_rows, token_budget=64,
            num_blocks=300 if family == "gemma3" else 60, kv_dtype=kv_dtype, deterministic=True, threads=1,
        )  # fmt: skip
        found = llm.generate(prompts, params, progress=False)
        assert not [one.error for one in found if one.error]
        return [one.outputs[0].token_ids for one in found]

    assert answers(1) == answers(32)
