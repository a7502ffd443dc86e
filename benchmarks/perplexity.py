"""What rounding costs: perplexity of the native kernels against the torch reference, on the same file and text.

    python benchmarks/perplexity.py [MODEL …] [--kilobytes 20] [--context 512] [--ways reference,default,8,mixed,16]

reference   plain torch: weights expanded to float32, nothing rounded
default     native kernels as the engine would run them
8, mixed, 16    native kernels that round what quantised weights are multiplied with in that way
kv8         native kernels with a KV cache of int8

The text is the language reference that comes with Python, cut into prompts of `--context` tokens. Prints a table and
one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import math
import sys

from context_shift import reference_text

from tokenmill import LLM, SamplingParams

WAYS: dict[str, dict[str, str]] = {
    "reference": {"backend": "reference"},
    "default": {"backend": "cpu"},
    **{bits: {"backend": "cpu", "activation_bits": bits} for bits in ("8", "mixed", "16")},
    "kv8": {"backend": "cpu", "kv_dtype": "int8"},
}


def perplexity(model: str, way: str, text: str, context: int, threads: int) -> float:
    llm = LLM(model, max_context=context + 16, threads=threads, **WAYS[way])  # type: ignore[arg-type]
    assert llm.frontend.tokenizer is not None
    tokens = llm.frontend.tokenizer.encode(text, add_special_tokens=True)
    prompts = [tokens[first : first + context] for first in range(0, len(tokens) - 1, context)]
    answers = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), progress=False)
    logprobs = [one.logprob for answer in answers for one in answer.prompt_logprobs or [] if one is not None]
    return math.exp(-sum(logprobs) / len(logprobs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["smollm2:135m"])
    parser.add_argument("--kilobytes", type=int, default=20)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ways", default="reference,default,8", help="separated by commas, the first is compared with")
    asked = parser.parse_args()
    text = reference_text()[: 1000 * asked.kilobytes]
    found: dict[str, dict[str, float]] = {}
    for model in asked.models:
        of_model = found.setdefault(model, {})
        for way in asked.ways.split(","):
            of_model[way] = perplexity(model, way, text, asked.context, asked.threads)
            ratio = of_model[way] / next(iter(of_model.values()))
            print(f"{model}  {way:>9}  {of_model[way]:10.4f}  x {ratio:.5f}", flush=True)
    print(json.dumps({"kilobytes": asked.kilobytes, "context": asked.context, "perplexity": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
