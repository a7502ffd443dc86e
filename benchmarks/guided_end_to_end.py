"""Schemas end to end: a model answers each at temperature 1, and what it finishes must validate with `jsonschema`.

    python benchmarks/guided_end_to_end.py DATA.jsonl.gz --model MODEL [--schemas 100] [--max-tokens 1000]

A tiny model draws nearly at random, which is the harshest test of masks. It also rambles (numbers of a thousand
zeros, strings without end), so repeats are penalised, what closes a string, list or object is favoured, and answers
may go on past its context. Those that the length cuts are counted, not judged. Prints counts and one JSON object as
the last line.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from tokenmill import LLM, SamplingParams
from tokenmill.engine.build import vocabulary_of
from tokenmill.engine.results import RequestOutput
from tokenmill.errors import InvalidRequest
from tokenmill.guided.compile import compile_grammar
from tokenmill.params import Guided


def enforceable(path: Path, llm: LLM, num_schemas: int) -> list[dict[str, Any]]:
    """The first schemas of the file that are not refused."""
    found: list[dict[str, Any]] = []
    vocabulary = vocabulary_of(llm.frontend.config, llm.frontend.spec, llm.frontend.tokenizer)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            schema = json.loads(line)["schema"]
            try:
                compile_grammar(Guided.schema(schema), vocabulary)
            except InvalidRequest:
                continue
            found.append(schema)
            if len(found) == num_schemas:
                break
    return found


def closing_tokens(llm: LLM) -> list[int]:
    """Those that end a string, a list or an object, and nothing else."""
    tokenizer = llm.frontend.tokenizer
    assert tokenizer is not None
    texts = {token_id: tokenizer.token_bytes(token_id) for token_id in range(llm.frontend.spec.vocab_size)}
    return [token_id for token_id, raw in texts.items() if raw.strip() in (b'"', b"]", b"}")]


def verdict(schema: dict[str, Any], answer: RequestOutput) -> str:
    output = answer.outputs[0]
    if answer.error is not None:
        return f"failed: {answer.error}"
    if output.finish_reason == "length":
        return "cut by length"
    checker = jsonschema.validators.validator_for(schema)(schema, format_checker=jsonschema.FormatChecker())
    try:
        checker.validate(json.loads(output.text))
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"INVALID {output.text[:200]!r}: {str(error)[:200]}")
        return "finished and invalid"
    return "finished and valid"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=1000)
    parser.add_argument("--frequency-penalty", type=float, default=0.3)
    parser.add_argument("--closing-bias", type=float, default=12.0)
    asked = parser.parse_args()
    llm = LLM(asked.model)
    schemas = enforceable(asked.data, llm, asked.schemas)
    bias = {token_id: asked.closing_bias for token_id in closing_tokens(llm)}
    params = [
        SamplingParams(
            guided=Guided.schema(schema),
            temperature=1.0,
            seed=seed,
            max_tokens=asked.max_tokens,
            frequency_penalty=asked.frequency_penalty,
            logit_bias=bias,
            context_shift=True,
        )
        for seed, schema in enumerate(schemas)
    ]
    answers = llm.generate(["Here is the answer:"] * len(schemas), params, progress=False)
    counts = Counter(verdict(schema, answer) for schema, answer in zip(schemas, answers, strict=True))
    for name, count in counts.most_common():
        print(f"{count:6}  {name}")
    passed = set(counts) <= {"finished and valid", "cut by length"} and counts["finished and valid"] > 0
    print(json.dumps({"schemas": len(schemas), **counts, "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
