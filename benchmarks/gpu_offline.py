"""Llama-3.1-8B's shape with random weights on one GPU: the workloads that engines are compared by.

    python benchmarks/gpu_offline.py DIR_WITH_CONFIG [--only single,steps,requests,prefill] [--quantization fp8] ...

Prints a table for people and one JSON object as the last line.
"""

# ruff: noqa: E402  (the clock starts before anything is imported)
from __future__ import annotations

import time

STARTED = time.perf_counter()

import argparse
import json
import random
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tokenmill import LLM, SamplingParams
from tokenmill.engine.startup.garbage_collection import relaxed_gc

IMPORTED = time.perf_counter()


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000, 100_000) for _ in range(length)]


def first_token(llm: LLM) -> dict[str, float]:
    llm.generate([prompt(random.Random(0), 32)], greedy(1), progress=False)
    return {"import_s": IMPORTED - STARTED, "start_to_first_token_s": time.perf_counter() - STARTED}


def single(llm: LLM) -> dict[str, float]:
    """Decode of one sequence, 128 in and 512 out."""
    rng = random.Random(2)
    llm.generate([prompt(rng, 128)], greedy(16), progress=False)
    began = time.perf_counter()
    llm.generate([prompt(rng, 128)], greedy(512), progress=False)
    seconds = time.perf_counter() - began
    return {"single_tok_s": 512 / seconds, "single_ms": seconds / 512 * 1e3}


def steps(llm: LLM) -> dict[str, float]:
    """Decoding steps around 512 tokens of context: 480 in, 64 out; the time of the steps in the middle."""
    from tokenmill.types import PromptRequest

    found = {}
    rng = random.Random(3)
    input_processor = llm.frontend.input_processor(llm.core.info.max_context)
    for count in (8, 32, 128):
        for _ in range(count):
            llm.core.add(input_processor.process(PromptRequest(prompt=prompt(rng, 480), params=greedy(64))))
        times = []
        with relaxed_gc():  # as serving and `LLM.generate` do
            while llm.core.has_work:
                began = time.perf_counter()
                outputs = llm.core.step()
                times.append((time.perf_counter() - began, len(outputs)))
        full = [seconds for seconds, num_outputs in times if num_outputs == count][8:-4]
        found[f"step_ms_{count}"] = sum(full) / len(full) * 1e3
        found[f"step_median_ms_{count}"] = median(full) * 1e3
    return found


def requests(llm: LLM) -> dict[str, float]:
    """1,000 requests, input U[256, 768], output U[128, 384], seed 1."""
    rng = random.Random(1)
    inputs = [rng.randint(256, 768) for _ in range(1000)]
    outputs = [rng.randint(128, 384) for _ in range(1000)]
    prompts = [prompt(rng, length) for length in inputs]
    began = time.perf_counter()
    answers = llm.generate(prompts, [greedy(length) for length in outputs], progress=False)
    seconds = time.perf_counter() - began
    drawn = sum(len(answer.outputs[0].token_ids) for answer in answers)
    assert drawn == sum(outputs), f"{drawn} tokens instead of {sum(outputs)}"
    return {
        "requests_s": seconds,
        "requests_out_tok_s": drawn / seconds,
        "requests_in": sum(inputs),
        "requests_out": drawn,
    }


def prefill(llm: LLM) -> dict[str, float]:
    """32 prompts of 4,096 tokens, one token out."""
    rng = random.Random(4)
    llm.generate([prompt(rng, 4096) for _ in range(2)], greedy(1), progress=False)
    prompts = [prompt(rng, 4096) for _ in range(32)]
    began = time.perf_counter()
    llm.generate(prompts, greedy(1), progress=False)
    return {"prefill_tok_s": 32 * 4096 / (time.perf_counter() - began)}


WORKLOADS = {"single": single, "steps": steps, "prefill": prefill, "requests": requests}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--max-running", type=int, default=1024)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument("--profile", help="a folder for a trace of each workload's kernels")
    given = parser.parse_args()
    llm = LLM(
        given.model,
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        quantization=given.quantization,
        max_running=given.max_running,
        token_budget=given.token_budget,
        max_context=given.max_context,
        max_waiting=4096,
        fast_start=True,
    )
    import torch  # the engine has imported it by now: that is part of its start

    print("\n".join(llm.core.info.reasons))
    figures: dict[str, float] = {**first_token(llm)}
    figures["load_s"] = llm.core.info.load_s
    began = time.perf_counter()
    llm.core.runner.prepare()  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    figures["prepare_s"] = time.perf_counter() - began
    figures["allocated_gib"] = torch.cuda.memory_allocated() / 2**30
    for name in given.only.split(","):
        if name:
            began = time.perf_counter()
            figures |= measured(llm, name, given.profile)
            print({key: round(value, 2) for key, value in figures.items()})
            print(f"  ({name}: {time.perf_counter() - began:.1f} s)", flush=True)
    figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    for name, value in figures.items():
        print(f"{name:28} {value:12,.2f}")
    print(json.dumps({"model": given.model, "quantization": given.quantization, **figures}))


def measured(llm: LLM, name: str, profile: str | None) -> dict[str, float]:
    if not profile:
        return WORKLOADS[name](llm)
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CUDA]) as trace:
        found = WORKLOADS[name](llm)
    print(trace.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=60))
    return found


if __name__ == "__main__":
    main()
