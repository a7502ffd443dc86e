"""Latent attention over chosen entries, experts without gates and GGUF's order of recurrent heads on a real
GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.large_model import relative_error
from tests.support.triton_inputs import paged_batch
from tokenmill import LLM, SamplingParams
from tokenmill.arch.indexer import Indexer
from tokenmill.ops.interface import ExpertsWeight, IndexInputs, LatentInputs, Norm, Routing
from tokenmill.ops.reference import REFERENCE_OPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
RANK, ROPE, NOPE, VALUE, BLOCK = 512, 64, 128, 128, 16
DECODE, MIXED = [(1, 3000), (1, 40), (1, 700), (1, 2049)], [(1, 2500), (300, 300), (70, 1100)]


def inputs_of(
    lengths: list[tuple[int, int]], heads: int, indexer: Indexer
) -> tuple[IndexInputs, LatentInputs, torch.Tensor]:
    """Return also the slots of every position of every row, [R, longest]"""
    from tokenmill.ops.triton.attention.plan import plan_attention

    torch.manual_seed(0)
    batch = paged_batch(lengths, BLOCK)
    tables = batch.groups[0].block_tables
    longest = max(context for _, context in lengths)
    every = torch.arange(longest)
    places = tables.long()[:, every // BLOCK] * BLOCK + every % BLOCK
    slots = torch.cat([places[row, end - count : end] for row, (count, end) in enumerate(lengths)]).cuda()
    batch = replace(
        batch,
        query_starts=batch.query_starts.cuda(),
        context_lens=batch.context_lens.cuda(),
        groups=(replace(batch.groups[0], block_tables=tables.cuda()),),
    )
    plan, count = plan_attention(batch, 0, None), len(slots)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    angles = torch.rand(count, ROPE // 2, device="cuda").cos(), torch.rand(count, ROPE // 2, device="cuda").sin()
    num_blocks, dim = 1 + tables.numel(), indexer.head_dim
    key_norm = Norm(torch.rand(dim, device="cuda") + 0.5, 1e-6, torch.randn(dim, device="cuda"), is_centred=True)
    index = IndexInputs(
        drawn(count, indexer.q_size), drawn(count, dim), drawn(count, indexer.num_heads), drawn(num_blocks, BLOCK, dim),
        slots, key_norm, angles, plan, indexer,
    )  # fmt: skip
    attention = LatentInputs(
        drawn(count, heads * (NOPE + ROPE)), drawn(count, RANK + ROPE), drawn(num_blocks, BLOCK, RANK + ROPE), slots,
        Norm(torch.rand(RANK, device="cuda") + 0.5, 1e-6), angles, drawn(heads, RANK, NOPE) * 0.1,
        drawn(heads, VALUE, RANK) * 0.1, plan, 0.05,
    )  # fmt: skip
    return index, attention, places.cuda()


@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(("heads", "top_k"), [(16, 256), (128, 2048)])
def test_chosen_entries(lengths: list[tuple[int, int]], heads: int, top_k: int) -> None:
    """Those with the highest scores, but for some that are as good as equal; attention over exactly those"""
    from tokenmill.ops.reference.elementwise import rotate
    from tokenmill.ops.triton.attention.latent import absorb_queries
    from tokenmill.ops.triton.build import build_ops

    ops, indexer = build_ops(), Indexer(64, 128, top_k)
    index, attention, places = inputs_of(lengths, heads, indexer)
    chosen = ops.choose_entries(index)
    result = ops.latent_attend(attention._replace(choice=chosen))
    queries = rotate(index.queries.view(-1, 64, 128), *index.cos_sin).float()
    keys, weights = index.kept.view(-1, 128).float(), index.weights.float() * indexer.scale
    entries, absorbed = (
        attention.latents.view(-1, RANK + ROPE).float(),
        absorb_queries(attention, len(attention.queries)).float(),
    )
    token, worst = 0, []
    for row, (count, context) in enumerate(lengths):
        for last in range(context - count, context):
            size = min(top_k, last + 1)
            assert int(chosen.counts[token]) == size and int(chosen.rows[token]) == row
            found = chosen.positions[token, :size].long()
            assert bool((found.diff() > 0).all()) and int(found[-1]) <= last
            scores = weights[token] @ (queries[token] @ keys[places[row, : last + 1]].T).relu()
            lowest = scores.topk(size).values[-1]
            assert bool((scores[found] >= lowest - 0.02 * scores.abs().max()).all())
            seen = entries[places[row, found]]
            mixed = torch.softmax(absorbed[token] @ seen.T * attention.scale, dim=-1) @ seen[:, :RANK]
            wanted = torch.einsum("hr,hvr->hv", mixed, attention.expand.float()).flatten()
            worst.append(relative_error(result[token], wanted))
            token += 1
    assert max(worst) < 0.03 and sum(worst) / len(worst) < 0.01, max(worst)


@pytest.mark.parametrize("num_tokens", [1, 5, 60, 400])
def test_experts_without_gates(num_tokens: int) -> None:
    """Nemotron 3's: squares of what is above 0"""
    from tokenmill.ops.triton.build import build_ops

    torch.manual_seed(0)
    ups, downs = (torch.randn(8, *shape, device="cuda").bfloat16() * 0.03 for shape in ((1856, 2688), (2688, 1856)))
    x, logits = torch.randn(num_tokens, 2688, device="cuda").bfloat16(), torch.randn(num_tokens, 8, device="cuda")
    chosen = REFERENCE_OPS.route(logits, Routing(3))
    found = build_ops().experts(x, *chosen, ExpertsWeight(8, (ups, downs), is_gated=False), "relu2")
    exact = ExpertsWeight(8, (ups.float(), downs.float()), is_gated=False)
    assert relative_error(found, REFERENCE_OPS.experts(x.float(), *chosen, exact, "relu2")) < 0.01


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "nemotron_h", "qwen3_5 as GGUF"])
def test_models_score_as_their_reference(name: str, tmp_path: Path, shared_dir: Path) -> None:
    """A prompt's logprobs and decoded tokens, in float32"""
    pytest.importorskip("transformers")
    if "GGUF" in name:
        pytest.importorskip("gguf")
    from tests.support.newer_families import model_path

    path = model_path(name, tmp_path, shared_dir)
    params = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=1, ignore_eos=True)
    prompt = torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(0)).tolist()

    def scores(device: str, backend: str) -> tuple[torch.Tensor, list[int]]:
        llm = LLM(
            str(path), device=device, backend=backend, dtype="float32", max_context=64, max_running=2, token_budget=64,
            num_blocks=60,
        )  # fmt: skip
        (found,) = llm.generate([prompt], params, progress=False)
        assert found.error is None and found.prompt_logprobs is not None
        known = [info.logprob for info in found.prompt_logprobs if info is not None]
        return torch.tensor(known), found.outputs[0].token_ids

    expected, found = scores("cpu", "reference"), scores("cuda", "triton")
    assert relative_error(found[0], expected[0]) < 1e-3 and found[1] == expected[1]
