"""Tokens per expert of a model, and how well copies of some experts balance the load of ranks.

    python benchmarks/experts.py MODEL LOADS.json [--ranks 4] [--copies 0,4,8] [--text FILE]

Computes a text (by default this program's own) on one rank with native kernels, counts the tokens that choose each
expert in each layer, and writes them to LOADS.json, which `--ep --expert-loads` places experts by. Prints the load of
the fullest rank against the mean, of the worst layer, for each number of copies.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tokenmill import LLM, SamplingParams
from tokenmill.ops.cpu.decoder import NativeDecoder
from tokenmill.parallel.experts import place_experts, rank_loads
from tokenmill.runner.runner import ModelRunner

CHUNK = 1000  # characters of a prompt


def count_tokens(model: str, text: str) -> dict[str, list[int]]:
    """Tokens by expert, of each layer's router."""
    llm = LLM(model, backend="cpu", speculate="off", prefix_caching=False)
    pieces = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
    llm.generate(pieces, SamplingParams(max_tokens=1), progress=False)
    runner = llm.core.runner
    assert isinstance(runner, ModelRunner) and isinstance(runner.model, NativeDecoder)
    return runner.model.expert_counts()


def imbalance(loads: dict[str, list[int]], ranks: int, copies: int) -> float:
    """Return the load of the most loaded rank relative to the mean, in the worst layer."""
    worst = 0.0
    for counts in loads.values():
        each = rank_loads(place_experts(len(counts), ranks, counts, copies), counts, ranks)
        worst = max(worst, max(each) * ranks / max(1.0, sum(each)))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("loads", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--copies", default="0,4,8")
    parser.add_argument("--text", type=Path, default=Path(__file__))
    asked = parser.parse_args()
    loads = count_tokens(asked.model, asked.text.read_text(encoding="utf-8"))
    if not loads:
        print("this model has no experts", file=sys.stderr)
        return 1
    asked.loads.write_text(json.dumps(loads))
    found = {copies: imbalance(loads, asked.ranks, copies) for copies in map(int, asked.copies.split(","))}
    for copies, share in found.items():
        print(f"{copies:3} copies: the fullest of {asked.ranks} ranks has {share:.2f} times the mean")
    print(json.dumps({"ranks": asked.ranks, "fullest": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
