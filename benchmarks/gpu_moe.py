"""A mixture of experts with random weights on one GPU: decoding against the memory's speed, and many sequences.

python benchmarks/gpu_moe.py DIR_WITH_CONFIG
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tokenmill import LLM, SamplingParams
from tokenmill.arch.cost import num_parameters
from tokenmill.arch.spec import ModelSpec, MoeSpec

READ_TB_S = 4.38  # what an H200 reads


def active_bytes(spec: ModelSpec) -> int:
    """bfloat16 weights that one token needs; of the embedding only its own row."""
    idle = 0
    for layer in spec.layers:
        if isinstance(layer.mlp, MoeSpec):
            expert = 3 * spec.hidden_size * layer.mlp.expert.intermediate_size
            idle += (layer.mlp.num_experts - layer.mlp.num_active) * expert
    embedding = 0 if spec.tied_head else spec.vocab_size * spec.hidden_size
    return 2 * (num_parameters(spec) - idle - embedding)


def timed(llm: LLM, count: int, num_in: int, num_out: int) -> float:
    rng = random.Random(count)
    prompts = [[rng.randrange(1000, 100_000) for _ in range(num_in)] for _ in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
    began = time.perf_counter()
    found = llm.generate(prompts, params, progress=False)
    assert all(len(one.outputs[0].token_ids) == num_out and not one.error for one in found)
    return time.perf_counter() - began


def main() -> None:
    llm = LLM(
        sys.argv[1], load_format="dummy", dtype="bfloat16", device="cuda", max_running=256, token_budget=8192,
        max_context=4096, max_waiting=4096,
    )  # fmt: skip
    timed(llm, 1, 128, 32)
    seconds = timed(llm, 1, 128, 256) / 256
    floor = active_bytes(llm.front.spec) / (READ_TB_S * 1e12)
    timed(llm, 256, 128, 8)
    many = timed(llm, 256, 128, 128)
    figures = {
        "single_tok_s": 1 / seconds,
        "share_of_bandwidth": floor / seconds,
        "many_256_out_tok_s": 256 * 128 / many,
    }
    for name, value in figures.items():
        print(f"{name:24} {value:10,.3f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
