"""OpenVINO GenAI with a GGUF file, paged attention and continuous batching, at its own defaults otherwise.

Prefill is timed as a call for one token. Decode is timed from the step in which every sequence has a token, by the
times the pipeline itself notes: the difference of two whole calls would be lost in the noise of long prompts. Runs as a
script; see the package's docstring for the protocol.
"""

from __future__ import annotations

import json
import random
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import openvino_genai as genai

VOCAB = 32000  # ids below this exist in every model compared


def load(path: str, threads: int) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 4096
    return genai.LLMPipeline(path, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads)


def call(pipe: Any, ids: Any, tokens: int) -> Any:
    settings = genai.GenerationConfig()
    settings.max_new_tokens = tokens
    settings.ignore_eos = True
    settings.do_sample = False
    settings.apply_chat_template = False
    return pipe.generate(genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids))), settings)


def seconds(pipe: Any, ids: Any) -> float:
    """A whole call for one token each."""
    began = time.perf_counter()
    call(pipe, ids, 1)
    return time.perf_counter() - began


def decode_rate(pipe: Any, ids: Any, tokens: int) -> float:
    """Tokens a second of the steps that follow the last prompt."""
    steps = call(pipe, ids, tokens).perf_metrics.raw_metrics
    times_ms, made = list(steps.m_new_token_times), list(steps.m_batch_sizes)
    if len(ids) not in made[:-1]:
        raise SystemExit(f"no step decoded all {len(ids)} sequences together (ask for longer answers)")
    first = made.index(len(ids))  # as many tokens as sequences: no sequence waits for its prompt any more
    return float(sum(made[first + 1 :]) / (times_ms[-1] - times_ms[first]) * 1e3)


def prompts(asked: dict[str, int], salt: str) -> Any:
    drawing = random.Random(f"{asked['seed']}/{salt}")
    shape = (asked["concurrency"], asked["input_len"])
    return np.array([[drawing.randrange(VOCAB) for _ in range(shape[1])] for _ in range(shape[0])], dtype=np.int64)


def run(pipe: Any, asked: dict[str, int]) -> dict[str, float | None]:
    count, length, steps = asked["concurrency"], asked["input_len"], asked["output_len"]
    call(pipe, prompts(asked, "warm")[:, :16], 2)
    found: dict[str, float | None] = {
        "prefill_tok_s": count * length / seconds(pipe, prompts(asked, "prefill")),
        "decode_tok_s": None,
    }
    if steps > 1:
        found["decode_tok_s"] = decode_rate(pipe, prompts(asked, "decode"), steps)
    return found


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    pipe = load(path, threads)
    print(json.dumps({"ready": True, "version": "openvino-genai " + version("openvino-genai")}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(pipe, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
