"""JSON schemas against instances that must be accepted or rejected (guidance-ai/jsonschemabench, MaskBench's data).

    python benchmarks/guided_maskbench.py DATA.jsonl.gz [--model MODEL]

Every schema is compiled with the model's vocabulary, and every instance, written as the engine writes JSON, is fed to
a matcher token by token. Fails when an invalid instance is accepted, when fewer than 95 % of the valid ones are, or
when a refusal gives no reason. Prints a table and one JSON object as the last line.
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

from tokenmill.arch.read import read_spec
from tokenmill.engine.build import vocabulary_of
from tokenmill.engine.frontend import tokenizer_of
from tokenmill.errors import InvalidRequest
from tokenmill.guided.compile import Compiled, compile_grammar
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.params import Guided
from tokenmill.store import resolve_model
from tokenmill.text.tokenizer import Tokenizer

LEAST_ACCEPTED = 0.95


def cases(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def accepts(compiled: Compiled, tokenizer: Tokenizer, instance: Any) -> bool:
    text = json.dumps(instance, ensure_ascii=False)
    matcher = compiled.matcher.fork()
    return matcher.advance(tokenizer.encode(text, add_special_tokens=False)) and matcher.is_complete


def measure(path: Path, tokenizer: Tokenizer, vocabulary: Vocabulary) -> tuple[Counter[str], Counter[str], list[float]]:
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    seconds = []
    for case in cases(path):
        counts["schemas"] += 1
        began = time.perf_counter()
        try:
            compiled = compile_grammar(Guided.schema(case["schema"]), vocabulary)
        except InvalidRequest as error:
            counts["refused"] += 1
            reasons[without_path(error.message)] += 1
            continue
        finally:
            seconds.append(time.perf_counter() - began)
        counts["compiled"] += 1
        for test in case["tests"]:
            verdict = "accepted" if accepts(compiled, tokenizer, test["data"]) else "rejected"
            counts[f"{'valid' if test['valid'] else 'invalid'} {verdict}"] += 1
    return counts, reasons, sorted(seconds)


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
    counts, reasons, seconds = measure(asked.data, tokenizer, vocabulary_of(path, read_spec(path)))
    accepted = counts["valid accepted"] / max(1, counts["valid accepted"] + counts["valid rejected"])
    for name in ("schemas", "compiled", "refused", "valid accepted", "valid rejected", "invalid accepted"):
        print(f"{name:18} {counts[name]:6}")
    print(f"{'invalid rejected':18} {counts['invalid rejected']:6}")
    print(f"valid instances accepted: {accepted:.1%}")
    print(f"compile: median {seconds[len(seconds) // 2] * 1e3:.1f} ms, longest {seconds[-1] * 1e3:.0f} ms")
    print("refused because:")
    for reason, count in reasons.most_common():
        print(f"{count:6}  {reason}")
    passed = counts["invalid accepted"] == 0 and accepted >= LEAST_ACCEPTED and all(reasons)
    print(json.dumps({**counts, "accepted_share": round(accepted, 4), "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
