"""A GPU that is full: requests of every kind are served from what was taken at start; steps ask for nothing more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1},
    {"temperature": 1.0, "typical_p": 0.9},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.0, "prompt_logprobs": 3},
    {"temperature": 0.9, "n": 3},
]
LEFT = 300 << 20  # for kernels that are loaded, and graphs that are captured, when they are first met


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_kind_of_request_is_served_when_others_fill_the_gpu(dtype: str, tmp_path: Path) -> None:
    """Prompts of which all tokens are scored, and rows that the host draws for, take hundreds of MiB at a time."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    llm = LLM(
        str(tmp_path), device="cuda", load_format="dummy", max_context=2000, max_running=200, token_budget=1024,
        num_blocks=4000, threads=1, dtype=dtype,
    )  # fmt: skip
    reserved = torch.cuda.memory_reserved()
    others = torch.empty(torch.cuda.mem_get_info()[0] - LEFT, dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    began = torch.cuda.memory_allocated()
    prompts = [[1000 + (701 * row + place) % 99_000 for place in range(10 + 5 * row)] for row in range(180)]
    params = [SamplingParams(max_tokens=8, seed=row, ignore_eos=True, **KINDS[row % len(KINDS)]) for row in range(180)]
    found = llm.generate(prompts, params, progress=False)
    assert not [one.error for one in found if one.error]
    assert len(llm.embed([[3000, 4000, 5000] * 40, [7000] * 1500])) == 2
    taken, more = torch.cuda.max_memory_allocated() - began, torch.cuda.memory_reserved() - reserved - others.nbytes
    print(f"steps took {taken >> 20} MiB at most, {more >> 20} MiB were asked for beside those held")
    assert taken > 100 << 20, "these requests would show nothing"
    assert more < LEFT
