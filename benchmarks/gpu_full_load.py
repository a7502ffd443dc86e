"""Output tokens per second of one GPU at full load: many requests of equal lengths at once, with random weights.

    python benchmarks/gpu_full_load.py DIR_WITH_CONFIG [--input 1024] [--output 1024] [--requests 512]
                                       [--quantization none|fp8|int8|int4]

Prints a table for people and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tokenmill import LLM, SamplingParams

SINGLE = 256  # tokens of the request that is alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--quantization", default="none")
    args = parser.parse_args()
    llm = LLM(
        args.model, load_format="dummy", dtype="bfloat16", device="cuda", quantization=args.quantization,
        max_running=args.requests, token_budget=8192, max_context=args.input + max(args.output, SINGLE) + 16,
        max_waiting=2 * args.requests, fast_start=True,
    )  # fmt: skip
    rng = random.Random(1)
    vocab = llm.frontend.spec.vocab_size

    def seconds_for(count: int, num_out: int) -> float:
        prompts = [[rng.randrange(vocab // 100, vocab // 2) for _ in range(args.input)] for _ in range(count)]
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        began = time.perf_counter()
        answers = llm.generate(prompts, params, progress=False)
        assert all(len(one.outputs[0].token_ids) == num_out and not one.error for one in answers)
        return time.perf_counter() - began

    seconds_for(8, 8)
    single = seconds_for(1, SINGLE) / SINGLE
    whole = seconds_for(args.requests, args.output)
    found = {
        "single_ms_a_token": single * 1e3,
        "seconds": whole,
        "out_tok_s": args.requests * args.output / whole,
        "in_and_out_tok_s": args.requests * (args.input + args.output) / whole,
    }
    for name, value in found.items():
        print(f"{name:20} {value:12,.2f}")
    print(json.dumps({"model": args.model, "requests": args.requests, "quantization": args.quantization, **found}))


if __name__ == "__main__":
    main()
