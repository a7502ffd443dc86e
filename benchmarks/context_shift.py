"""Perplexity along a text many times longer than the context: the shifting context against a plain window.

    python benchmarks/context_shift.py [--model smollm2:135m] [--context 1024] [--keep 4] [--tokens 20000] [--ways …]
    python benchmarks/context_shift.py --price 3000          what shifting costs while so many tokens are drawn

shifted         the engine with `--context-shift`: first tokens and a window, positions within the cache
shifted-0       the same with nothing kept: a window computed anew grows sinks of its own, so this should be flat too
plain           the same weights with a sliding window in every layer, no shift: the first tokens leave the cache, and
                with them what attention rests on
rotated         first tokens and a window whose keys are rotated to their new positions in place and not computed again,
rotated-0       with nothing kept; both in the torch reference with a float16 cache (see `rotated_keys.py`)
rotated-float32 with a float32 cache: what rounding again and again costs

The text is the language reference that comes with Python (`--text FILE` for another), paragraphs that repeat left out.
Prints a table and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rotated_keys import rotated_logprobs

from tokenmill import LLM, SamplingParams
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig
from tokenmill.engine.build import assemble
from tokenmill.engine.model import kv_storage, open_source
from tokenmill.engine.resolve import resolve_model_config
from tokenmill.scheduler.request import num_dropped
from tokenmill.types import ContextShift, PromptRequest, Request

Logprobs = list[float]


def reference_text() -> str:
    """Python's own documentation, each paragraph once."""
    topics = pydoc_data.topics.topics
    paragraphs = (part for name in sorted(topics) for part in topics[name].split("\n\n"))
    return "\n\n".join(dict.fromkeys(paragraphs))


def shifted_logprobs(model: str, context: int, keep: int, tokens: list[int]) -> Logprobs:
    llm = LLM(model, max_context=context, context_shift=True, context_keep=keep, threads=1)
    (answer,) = llm.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=0), progress=False)
    assert answer.prompt_logprobs is not None
    return [info.logprob for info in answer.prompt_logprobs if info is not None]


def windowed(spec: ModelSpec, window: int, max_context: int) -> ModelSpec:
    layers = tuple(replace(layer, mixer=replace(layer.mixer, window=window)) for layer in spec.layers)
    return replace(spec, layers=layers, max_context=max_context)


def plain_logprobs(path: Path, context: int, tokens: list[int]) -> Logprobs:
    """Positions go on to the end of the text; what counts is how far apart they are, and that is never more than the
    window."""
    spec = windowed(read_spec(path), context, len(tokens) + 1)
    asked = EngineConfig(
        ModelConfig(model=str(path), max_context=len(tokens) + 1),
        CacheConfig(num_blocks=len(tokens) // 16 + 64),
        ops=OpsConfig(threads=1),
    )
    resolved = resolve_model_config(asked, spec, path)
    config = resolved.config
    model = resolved.backend.build_model(config, spec, open_source(config, path, spec))
    core = assemble(config, model, kv_storage(config, spec))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    core.add(Request(request_id="text", prompt_token_ids=tokens, params=params, max_tokens=1, seed=0))
    outputs = [output for _ in iter(lambda: core.has_work, False) for output in core.step()]
    (scores,) = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return [one.logprob for one in scores]


def perplexities(logprobs: Logprobs, bin_size: int) -> list[float]:
    parts = [logprobs[first : first + bin_size] for first in range(0, len(logprobs), bin_size)]
    return [math.exp(-sum(part) / len(part)) for part in parts if len(part) > bin_size // 2]


def table(curves: dict[str, list[float]], bin_size: int) -> str:
    names = list(curves)
    lines = ["tokens up to  " + "  ".join(f"{name:>16}" for name in names)]
    for number, values in enumerate(zip(*curves.values(), strict=True), start=1):
        lines.append(f"{number * bin_size:12,}  " + "  ".join(f"{value:16.2f}" for value in values))
    return "\n".join(lines)


def print_price(model: str, context: int, keep: int, num_tokens: int) -> None:
    """A step that computes a window anew takes many times as long as one that draws a token."""
    llm = LLM(model, max_context=context, context_shift=True, context_keep=keep, threads=1)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1)
    llm.core.add(llm.frontend.input_processor(context).process(PromptRequest(prompt="Once upon a time", params=params)))
    steps: list[float] = []
    while llm.core.has_work:
        began = time.perf_counter()
        llm.core.step()
        steps.append(time.perf_counter() - began)
    usual = statistics.median(steps)
    long = [step for step in steps if step > 5 * usual]
    shifts = num_dropped(ContextShift(context, keep, (context - keep) // 2), num_tokens) // ((context - keep) // 2)
    print(
        f"{num_tokens} tokens in {sum(steps):.1f} s, {1 / usual:.0f} tok/s between shifts; {shifts} shifts took "
        f"{sum(long):.2f} s, {sum(long) / sum(steps):.1%} of the time, {sum(long) / max(1, shifts):.2f} s each"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--keep", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--bin", type=int, default=2_000)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--ways", default="shifted,shifted-0,plain", help="which curves, separated by commas")
    parser.add_argument("--price", type=int, help="instead: draw so many tokens and see what the shifts cost")
    asked = parser.parse_args()
    if asked.price:
        print_price(asked.model, asked.context, asked.keep, asked.price)
        return 0
    frontend = LLM(asked.model, max_context=asked.context, threads=1).frontend
    text = asked.text.read_text(encoding="utf-8") if asked.text else reference_text()
    assert frontend.tokenizer is not None
    tokens = frontend.tokenizer.encode(text, add_special_tokens=True)[: asked.tokens]
    path, context, keep = frontend.model_path, asked.context, asked.keep
    ways: dict[str, Callable[[], Logprobs]] = {
        "shifted": lambda: shifted_logprobs(asked.model, context, keep, tokens),
        "shifted-0": lambda: shifted_logprobs(asked.model, context, 0, tokens),
        "plain": lambda: plain_logprobs(path, context, tokens),
        "rotated": lambda: rotated_logprobs(path, context, keep, tokens),
        "rotated-0": lambda: rotated_logprobs(path, context, 0, tokens),
        "rotated-float32": lambda: rotated_logprobs(path, context, keep, tokens, torch.float32),
    }
    curves: dict[str, list[float]] = {}
    for name in asked.ways.split(","):
        began = time.perf_counter()
        curves[name] = perplexities(ways[name](), asked.bin)
        rounded = [round(value, 2) for value in curves[name]]
        print(f"{name}: {time.perf_counter() - began:.0f} s, {rounded}", file=sys.stderr, flush=True)
    print(f"{len(tokens):,} tokens, context {context:,}, {keep} kept: perplexity of each {asked.bin:,} tokens")
    print(table(curves, asked.bin))
    print(json.dumps({"context": context, "keep": keep, "bin": asked.bin, "perplexity": curves}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
