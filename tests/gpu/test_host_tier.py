"""Blocks kept in pinned memory beside a real GPU: with `--deterministic` the same tokens as when they are computed,
while other streams write and overwrite blocks beside the copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import VOCAB, make_reference
from tokenmill import LLM, SamplingParams
from tokenmill.kv.traffic import BlockTraffic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
NUM_PROMPTS, LENGTH, NUM_ROUNDS = 12, 400, 4
NUM_ANSWERED, BLOCK = 24, 16


def prompts() -> list[list[int]]:
    drawing = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (LENGTH,), generator=drawing).tolist() for _ in range(NUM_PROMPTS)]


NUM_BLOCKS = {"llama": 100, "gemma3": 700}  # room for three of the prompts; a token of layer groups has several


def opened(folder: Path, num_blocks: int, **settings: float) -> LLM:
    return LLM(
        str(folder), device="cuda", dtype="bfloat16", deterministic=True, max_context=512, max_running=8,
        token_budget=128, num_blocks=num_blocks, speculate="off", **settings,
    )  # fmt: skip


def rounds(llm: LLM) -> list[list[int]]:
    """All prompts several times, together: each round overwrites the blocks of the last one."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_ANSWERED, ignore_eos=True)
    found = [one for _ in range(NUM_ROUNDS) for one in llm.generate(prompts(), params, progress=False)]
    assert not [one.error for one in found if one.error]
    return [one.outputs[0].token_ids for one in found]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_fetched_blocks_give_the_same_tokens(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockTraffic, "seconds", lambda self, found: 0.0)  # always worth it
    monkeypatch.setattr("tokenmill.scheduler.fetches.LATE_S", 60.0)
    monkeypatch.setattr("tokenmill.scheduler.fetches.DEFAULT_LIMIT_S", 60.0)
    make_reference(family, max_position_embeddings=512).save_pretrained(tmp_path)
    plain = opened(tmp_path, NUM_BLOCKS[family])
    expected, num_computed = rounds(plain), plain.core.stats().step_tokens
    keeping = opened(tmp_path, NUM_BLOCKS[family], kv_host_gb=0.1)
    assert rounds(keeping) == expected
    stats = keeping.core.stats()
    assert stats.fetched_tokens > NUM_PROMPTS * LENGTH // 2, "the pool keeps some of them all the time"
    # Ends of prompts are computed each time, and on a busy machine blocks that are overwritten before they are copied.
    assert stats.step_tokens <= num_computed // 2, "what is kept is not computed again"
    keeping.close()
