"""A mixture of experts with random weights on one GPU: decoding against the memory's speed, and many sequences.

    python benchmarks/gpu_moe.py DIR_WITH_CONFIG

One sequence is told in two ways: a whole request, from asking to the answer, with its prompt and all that is done
around it; and decoding alone, from the first token's arrival to the last's. Both stand beside the time that reading the
weights of one token takes.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tokenmill import LLM, SamplingParams
from tokenmill.arch.cost import num_parameters
from tokenmill.arch.spec import ModelSpec, MoeSpec
from tokenmill.bench.engine_steps import StepRun, drive, random_requests

READ_TB_S = 4.38  # what an H200 reads
NUM_IN, NUM_OUT, ROUNDS = 128, 256, 3


def active_bytes(spec: ModelSpec) -> int:
    """bfloat16 weights that one token needs; of the embedding only its own row."""
    idle = 0
    for layer in spec.layers:
        if isinstance(layer.mlp, MoeSpec):
            expert = 3 * spec.hidden_size * layer.mlp.expert.intermediate_size
            idle += (layer.mlp.num_experts - layer.mlp.num_active) * expert
    embedding = 0 if spec.tied_head else spec.vocab_size * spec.hidden_size
    return 2 * (num_parameters(spec) - idle - embedding)


def whole_request_s(llm: LLM, count: int, num_out: int, seed: int) -> float:
    """Return the seconds that `count` concurrent requests take whose prompts are not cached."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000, 100_000) for _ in range(NUM_IN)] for _ in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
    began = time.perf_counter()
    found = llm.generate(prompts, params, progress=False)
    assert all(len(one.outputs[0].token_ids) == num_out and not one.error for one in found)
    return time.perf_counter() - began


def step_by_step(llm: LLM, seed: int) -> StepRun:
    requests = random_requests([NUM_IN], [NUM_OUT], llm.frontend.spec.vocab_size, seed=seed, name="alone")
    return drive(llm.core, requests)


def main() -> None:
    llm = LLM(
        sys.argv[1], load_format="dummy", dtype="bfloat16", device="cuda", max_running=256, token_budget=8192,
        max_context=4096, max_waiting=4096, fast_start=True,
    )  # fmt: skip
    llm.core.runner.prepare()  # type: ignore[attr-defined]  # as a server does while it is idle: compilers end first
    whole_request_s(llm, 1, 32, seed=0)
    whole = median(whole_request_s(llm, 1, NUM_OUT, seed) for seed in range(1, 1 + ROUNDS)) / NUM_OUT
    runs = [step_by_step(llm, seed) for seed in range(ROUNDS)]
    first = median(run.first_token_s[0] for run in runs)
    decoding = median((run.elapsed_s - run.first_token_s[0]) / (NUM_OUT - 1) for run in runs)
    floor = active_bytes(llm.frontend.spec) / (READ_TB_S * 1e12)
    whole_request_s(llm, 256, 8, seed=100)
    many = whole_request_s(llm, 256, 128, seed=101)
    figures = {
        "whole_request_tok_s": 1 / whole,
        "whole_request_share_of_bandwidth": floor / whole,
        "first_token_ms": 1e3 * first,
        "decoding_alone_tok_s": 1 / decoding,
        "decoding_alone_share_of_bandwidth": floor / decoding,
        "many_256_out_tok_s": 256 * 128 / many,
    }
    for name, value in figures.items():
        print(f"{name:34} {value:10,.3f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
