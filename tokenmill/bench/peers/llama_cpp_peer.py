"""llama.cpp through its own C interface (package llama-cpp-python), as `llama-batched-bench` does it.

Prompts of all sequences are decoded in batches of `n_batch` tokens, then one token a sequence and step. Nothing is
sampled: the time is the library's alone. Runs as a script; see the package's docstring for the protocol.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time
from typing import Any

import llama_cpp as lib

N_BATCH = 512
QUIET = lib.llama_log_callback(lambda level, text, data: None)  # the library keeps a pointer to it


def load(path: str) -> Any:
    lib.llama_backend_init()
    lib.llama_log_set(QUIET, ctypes.c_void_p(0))
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp can't load {path}")
    return model


def context_for(model: Any, threads: int, sequences: int, tokens: int) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = sequences * (tokens + 16)
    params.n_batch = params.n_ubatch = N_BATCH
    params.n_seq_max = sequences
    params.n_threads = params.n_threads_batch = threads
    return lib.llama_init_from_model(model, params)


def decode(context: Any, batch: Any, entries: list[tuple[int, int, int, bool]]) -> None:
    """entries: (token, position, sequence, wants logits)"""
    for start in range(0, len(entries), N_BATCH):
        part = entries[start : start + N_BATCH]
        batch.n_tokens = len(part)
        for i, (token, position, sequence, wanted) in enumerate(part):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if lib.llama_decode(context, batch) != 0:
            raise SystemExit("llama_decode failed")
    lib.llama_synchronize(context)


def run(model: Any, threads: int, asked: dict[str, int]) -> dict[str, float | None]:
    length, steps, count = asked["input_len"], asked["output_len"], asked["concurrency"]
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    drawing = random.Random(asked["seed"])
    context = context_for(model, threads, count, length + steps)
    batch = lib.llama_batch_init(N_BATCH, 0, 1)
    decode(context, batch, [(1, 0, 0, True)])  # warm-up: allocates what the first call allocates
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    prompt = [(drawing.randrange(vocab), p, s, p == length - 1) for s in range(count) for p in range(length)]
    began = time.perf_counter()
    decode(context, batch, prompt)
    middle = time.perf_counter()
    for step in range(steps - 1):
        decode(context, batch, [(drawing.randrange(vocab), length + step, s, True) for s in range(count)])
    end = time.perf_counter()
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    decode_tok_s = count * (steps - 1) / (end - middle) if steps > 1 else None
    return {"prefill_tok_s": count * length / (middle - began), "decode_tok_s": decode_tok_s}


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    model = load(path)
    print(json.dumps({"ready": True, "version": "llama-cpp-python " + lib.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, threads, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
