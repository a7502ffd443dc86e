"""Ranks against threads: one rank of N threads, and N ranks of one thread, on the same cores.

    python benchmarks/ranks.py [--shape benchmarks/shapes/FOLDER] [--ranks 2] [--rounds 7]

Both engines are loaded, with random weights of 8 bits, and measured in turns: a decode of 16 sequences and a prompt of
512 tokens. Their tokens must be the same. Prints medians and their ratio, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tokenmill import LLM, SamplingParams

ONE_B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
ROWS, NEW_TOKENS, PROMPT = 16, 24, 512


def measure(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds for the answers, and their tokens."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    began_s = time.perf_counter()
    answers = llm.generate(prompts, params, progress=False)
    return time.perf_counter() - began_s, [list(answer.outputs[0].token_ids) for answer in answers]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, help="a folder with a config.json; a Llama of 1B by default")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = asked.shape or Path(folder)
        if asked.shape is None:
            (shape / "config.json").write_text(json.dumps(ONE_B))
        common = {"load_format": "dummy", "quantization": "int8", "max_context": 1024, "num_blocks": 1500,
                  "prefix_caching": False, "speculate": "off"}  # fmt: skip
        engines = {
            f"1 rank of {asked.ranks} threads": LLM(str(shape), threads=asked.ranks, **common),
            f"{asked.ranks} ranks of 1 thread": LLM(str(shape), tp=asked.ranks, threads=1, **common),
        }
        seconds: dict[str, dict[str, list[float]]] = {name: {"decode": [], "prefill": []} for name in engines}
        draw = random.Random(0)
        for _ in range(asked.rounds):
            short = [[draw.randrange(3, 30000) for _ in range(4)] for _ in range(ROWS)]
            long = [[draw.randrange(3, 30000) for _ in range(PROMPT)]]
            tokens = []
            for name, llm in engines.items():
                decode_s, drawn = measure(llm, short, NEW_TOKENS)
                prefill_s, first = measure(llm, long, 1)
                seconds[name]["decode"].append(decode_s)
                seconds[name]["prefill"].append(prefill_s)
                tokens.append((drawn, first))
            assert tokens[0] == tokens[1], "the number of ranks changed tokens"
    medians = {name: {kind: statistics.median(each) for kind, each in found.items()} for name, found in seconds.items()}
    one, several = medians.values()
    ratios = {kind: one[kind] / several[kind] for kind in one}
    for name, found in medians.items():
        rates = (
            f"{ROWS * NEW_TOKENS / found['decode']:8.1f} tok/s decode {PROMPT / found['prefill']:8.1f} tok/s prefill"
        )
        print(f"{name:24}{rates}")
    print(f"ranks / threads         {ratios['decode']:8.2f}              {ratios['prefill']:8.2f}")
    print(json.dumps({"medians_s": medians, "ratios": ratios, "rounds": asked.rounds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
