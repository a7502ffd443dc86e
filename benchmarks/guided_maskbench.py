"""JSON schemas against instances that must be accepted or rejected (guidance-ai/jsonschemabench, MaskBench's data).

    python benchmarks/guided_maskbench.py DATA.jsonl.gz [--model MODEL]

Every schema is compiled with the model's vocabulary, and every instance, written as the engine writes JSON, is fed to
a matcher token by token. The same is done with llguidance alone, with its own limits and without our checks. Fails when
an invalid instance is accepted, when fewer than 95 % of the valid ones are, when a refusal gives no reason, or when
llguidance alone gets a schema right (compiled, and every instance judged as it must be) that we do not. Prints a table
and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from tokenmill.arch.read import read_spec
from tokenmill.config import EngineConfig, ModelConfig
from tokenmill.engine.build import vocabulary_of
from tokenmill.engine.frontend import tokenizer_of
from tokenmill.errors import InvalidRequest
from tokenmill.guided.compile import compile_grammar
from tokenmill.guided.grammar import LAYOUT, STRICT
from tokenmill.guided.matcher import Matcher
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.params import Guided
from tokenmill.store import resolve_model
from tokenmill.text.tokenizer import Tokenizer

LEAST_ACCEPTED = 0.95


def cases(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def accepts(initial: Matcher, tokenizer: Tokenizer, instance: Any) -> bool:
    text = json.dumps(instance, ensure_ascii=False)
    matcher = initial.fork()
    return matcher.advance(tokenizer.encode(text, add_special_tokens=False)) and matcher.is_complete


def measure(path: Path, tokenizer: Tokenizer, vocabulary: Vocabulary) -> tuple[Counter[str], Counter[str], list[float]]:
    """Return counts, reasons of refusals and the seconds of each compilation."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    seconds = []
    for case in cases(path):
        counts["schemas"] += 1
        alone = plain_matcher(case["schema"], vocabulary)
        is_right_alone = alone is not None and all(is_right(alone, tokenizer, test) for test in case["tests"])
        counts["right (llguidance alone)"] += is_right_alone
        began = time.perf_counter()
        try:
            compiled = compile_grammar(Guided.schema(case["schema"]), vocabulary)
        except InvalidRequest as error:
            counts["refused"] += 1
            reasons[without_path(error.message)] += 1
            counts["lost against llguidance"] += is_right_alone
            continue
        finally:
            seconds.append(time.perf_counter() - began)
        counts["compiled"] += 1
        ours_is_right = all(is_right(compiled.matcher, tokenizer, test) for test in case["tests"])
        counts["right"] += ours_is_right
        counts["lost against llguidance"] += is_right_alone and not ours_is_right
        for test in case["tests"]:
            verdict = "accepted" if accepts(compiled.matcher, tokenizer, test["data"]) else "rejected"
            counts[f"{'valid' if test['valid'] else 'invalid'} {verdict}"] += 1
    return counts, reasons, sorted(seconds)


def is_right(matcher: Matcher, tokenizer: Tokenizer, test: dict[str, Any]) -> bool:
    return accepts(matcher, tokenizer, test["data"]) == test["valid"]


def plain_matcher(schema: Any, vocabulary: Vocabulary) -> Matcher | None:
    """Return llguidance's own matcher of a schema, with its own limits; None if it refuses the schema."""
    try:
        text = LLMatcher.grammar_from_json_schema(schema, defaults=LAYOUT, overrides=STRICT)
        matcher = Matcher(LLMatcher(vocabulary.ll, text, log_level=0), vocabulary)
    except (ValueError, RecursionError):
        return None
    return matcher if matcher.error is None else None


def without_path(message: str) -> str:
    return re.sub(r", at #.*", "", message).removeprefix("the schema can't be enforced: ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="smollm2:135m")
    asked = parser.parse_args()
    path = resolve_model(asked.model).path
    tokenizer = tokenizer_of(path)
    if tokenizer is None:
        sys.exit("the model has no tokenizer")
    config = EngineConfig(ModelConfig(model=asked.model))
    counts, reasons, seconds = measure(asked.data, tokenizer, vocabulary_of(config, read_spec(path), tokenizer))
    accepted = counts["valid accepted"] / max(1, counts["valid accepted"] + counts["valid rejected"])
    for name in ("schemas", "compiled", "refused", "valid accepted", "valid rejected", "invalid accepted"):
        print(f"{name:18} {counts[name]:6}")
    print(f"{'invalid rejected':18} {counts['invalid rejected']:6}")
    print(f"schemas right: {counts['right']}; llguidance alone {counts['right (llguidance alone)']}")
    print(f"valid instances accepted: {accepted:.1%}")
    print(f"compile: median {seconds[len(seconds) // 2] * 1e3:.1f} ms, longest {seconds[-1] * 1e3:.0f} ms")
    print("refused because:")
    for reason, count in reasons.most_common():
        print(f"{count:6}  {reason}")
    passed = counts["invalid accepted"] == counts["lost against llguidance"] == 0
    passed = passed and accepted >= LEAST_ACCEPTED and all(reasons)
    print(json.dumps({**counts, "accepted_share": round(accepted, 4), "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
