"""What constraints cost and save: tokens per second of 16 answers, each with a schema of its own, against none.

    python benchmarks/guided_throughput.py [--model MODEL] [--tokens 96] [--rounds 3]

free       16 answers without constraint, as many tokens each
drawn      the same prompts with 16 schemas of free texts, every token drawn (logprobs are asked for, so none is jumped)
jumped     the same, forced tokens computed as chunks
keys       one schema of long fixed names: steps with every token drawn against steps with forced ones jumped

Rates are the best of several rounds taken in turns; core seconds show the cost on a machine that others use too.
Prints a table and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from tokenmill import LLM, SamplingParams
from tokenmill.params import Guided

NUM_SEQUENCES = 16
LEAST_SHARE, LEAST_SAVING = 0.95, 1.5


def schema(number: int) -> dict[str, Any]:
    """A list of texts that does not end before the tokens do; sixteen different ones."""
    item = {
        "type": "object",
        "properties": {f"title_{number}": {"type": "string", "maxLength": 60 + number}, "note": {"type": "string"}},
        "required": [f"title_{number}", "note"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 50 + number}


def long_keys() -> dict[str, Any]:
    names = [f"{what}_of_the_person_who_is_described" for what in ("first_name", "last_name", "occupation", "city")]
    properties = {name: {"type": "string", "maxLength": 8} for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def prompts() -> list[str]:
    return [
        f"Write a list of {number + 3} notes about the sea, the wind and the sky." for number in range(NUM_SEQUENCES)
    ]


class Timed:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def run(self, asked: list[str], params: list[SamplingParams]) -> tuple[int, int, float, float]:
        """Output tokens, steps, seconds, seconds of all cores."""
        steps_before, began, cpu_before = self._llm.core.stats().steps, time.perf_counter(), time.process_time()
        answers = self._llm.generate(asked, params, progress=False)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_before
        tokens = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
        return tokens, self._llm.core.stats().steps - steps_before, seconds, cpu_seconds


def variants(num_tokens: int) -> dict[str, list[SamplingParams]]:
    """`logprobs` of free rows too where drawn ones have them: both pay for the same."""
    shared: dict[str, Any] = {"max_tokens": num_tokens, "temperature": 0.0}
    guided = [Guided.schema(schema(number)) for number in range(NUM_SEQUENCES)]
    return {
        "free": [SamplingParams(**shared, ignore_eos=True)] * NUM_SEQUENCES,
        "jumped": [SamplingParams(**shared, guided=one) for one in guided],
        "free, logprobs": [SamplingParams(**shared, ignore_eos=True, logprobs=0)] * NUM_SEQUENCES,
        "drawn, logprobs": [SamplingParams(**shared, guided=one, logprobs=0) for one in guided],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    timed = Timed(LLM(asked.model, prefix_caching=False, speculate="off"))
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for params in variants(8).values():
        timed.run(prompts(), params)  # compiles the grammars, warms caches
    for _ in range(asked.rounds):  # in turns: a busy machine is busy for all of them
        for name, params in variants(asked.tokens).items():
            tokens, steps, seconds, cpu_seconds = timed.run(prompts(), params)
            wall.setdefault(name, []).append(tokens / seconds)
            cpu.setdefault(name, []).append(tokens / cpu_seconds)
            rates = f"{tokens / seconds:8.1f} tokens/s, {tokens / cpu_seconds:8.1f} per core second"
            print(f"{name:16} {tokens:6} tokens {steps:5} steps {seconds:7.2f} s {rates}")
    keys = SamplingParams(max_tokens=200, temperature=0.0, guided=Guided.schema(long_keys()))
    _, jumped_steps, *_ = timed.run(prompts()[:1], [keys])
    _, drawn_steps, *_ = timed.run(prompts()[:1], [SamplingParams(**_fields(keys), logprobs=0)])
    share = max(wall["jumped"]) / max(wall["free"])
    cpu_share = max(cpu["jumped"]) / max(cpu["free"])
    drawn_share = max(cpu["drawn, logprobs"]) / max(cpu["free, logprobs"])
    saving = drawn_steps / jumped_steps
    print(f"constrained / free, best of {asked.rounds}: {share:.3f}; per core second {cpu_share:.3f}")
    print(f"every token drawn, per core second: {drawn_share:.3f}")
    print(f"steps for long names: {drawn_steps} drawn, {jumped_steps} jumped, {saving:.2f}x fewer")
    passed = share >= LEAST_SHARE and saving >= LEAST_SAVING
    shares = {"share": share, "cpu_share": cpu_share, "drawn_cpu_share": drawn_share, "step_saving": saving}
    print(json.dumps({**{name: round(value, 3) for name, value in shares.items()}, "passed": passed}))
    return 0 if passed else 1


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {"max_tokens": params.max_tokens, "temperature": params.temperature, "guided": params.guided}


if __name__ == "__main__":
    sys.exit(main())
