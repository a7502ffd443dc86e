"""Record what llama.cpp's own samplers make of given logits: which tokens stay, and with what probability.

    python tests/goldens/record_llama_samplers.py MODEL.gguf OUT.json      (needs llama-cpp-python; the vocabulary only)

Every case is a chain of llama.cpp's samplers over logits of `random.Random(seed)`; DRY and the penalties are told a
history first. `test_llama_cpp_samplers.py` runs ours over the same logits and compares.
"""

from __future__ import annotations

import ctypes
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import llama_cpp as ll

VOCAB = 48
KEEP = 1
ALL = 4096  # tokens back: more than any history here
CHAINS: list[dict[str, Any]] = [
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"typical_p": 0.7},
    {"top_n_sigma": 1.2},
    {"xtc_probability": 1.0, "xtc_threshold": 0.06},
    {"temperature": 0.6},
    {"temperature": 0.8, "dynatemp_range": 0.5, "dynatemp_exponent": 1.0},
    {"temperature": 1.2, "dynatemp_range": 2.0, "dynatemp_exponent": 0.4},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 0.7, "top_k": 20, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.02},
    {"dry_multiplier": 0.8},
    {"dry_multiplier": 1.5, "dry_base": 1.2, "dry_allowed_length": 1},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_penalty_last_n": 12},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_sequence_breakers": ["\n", "ab"]},
]
MIROSTAT = [{"mirostat_tau": 3.0, "mirostat_eta": 0.1}, {"mirostat_tau": 1.5, "mirostat_eta": 0.4}]
NUM_SEEDS, NUM_MIROSTAT_STEPS = 4, 30
DRY_TEXTS = [
    "the cat sat on the mat and the cat sat on the",
    "one two three\none two three\none two",
    'say "hello world" and say "hello world" and say',
    "abc abd xab abc abd xab abc",
]


def logits_of(seed: int, size: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(0.0, 2.0) for _ in range(size)]


def candidates(logits: list[float], ids: list[int] | None = None) -> Any:
    data = (ll.llama_token_data * len(logits))()
    for place, logit in enumerate(logits):
        data[place].id = ids[place] if ids else place
        data[place].logit = logit
    return ll.llama_token_data_array(data=data, size=len(logits), selected=-1, sorted=False), data


def sampler_of(params: dict[str, Any], vocab: Any) -> Any:
    chain = ll.llama_sampler_chain_init(ll.llama_sampler_chain_default_params())
    for sampler in _samplers(params, vocab):
        ll.llama_sampler_chain_add(chain, sampler)
    return chain


def _samplers(k: dict[str, Any], vocab: Any) -> list[Any]:
    """In our order."""
    found: list[Any] = []
    if "repetition_penalty" in k:
        found.append(
            ll.llama_sampler_init_penalties(
                VOCAB, ALL, k["repetition_penalty"], k["frequency_penalty"], k["presence_penalty"]
            )
        )
    if "dry_multiplier" in k:
        found.append(_dry(k, vocab))
    if "top_n_sigma" in k:
        found.append(ll.llama_sampler_init_top_n_sigma(k["top_n_sigma"]))
    if "temperature" in k:
        range_, exponent = k.get("dynatemp_range", 0.0), k.get("dynatemp_exponent", 1.0)
        found.append(ll.llama_sampler_init_temp_ext(k["temperature"], range_, exponent))
    if "top_k" in k:
        found.append(ll.llama_sampler_init_top_k(k["top_k"]))
    if "typical_p" in k:
        found.append(ll.llama_sampler_init_typical(k["typical_p"], KEEP))
    if "top_p" in k:
        found.append(ll.llama_sampler_init_top_p(k["top_p"], KEEP))
    if "min_p" in k:
        found.append(ll.llama_sampler_init_min_p(k["min_p"], KEEP))
    if "xtc_probability" in k:
        found.append(ll.llama_sampler_init_xtc(k["xtc_probability"], k["xtc_threshold"], KEEP, 1))
    return found


def _dry(k: dict[str, Any], vocab: Any) -> Any:
    breakers = [text.encode() for text in k.get("dry_sequence_breakers", ["\n", ":", '"', "*"])]
    given = (ctypes.c_char_p * len(breakers))(*breakers)
    return ll.llama_sampler_init_dry(
        vocab,
        k["dry_multiplier"],
        k.get("dry_base", 1.75),
        k.get("dry_allowed_length", 2),
        k.get("dry_penalty_last_n", ALL),
        given,
        len(breakers),
    )


def applied(chain: Any, logits: list[float], ids: list[int] | None = None) -> dict[str, float]:
    """What is left: token -> probability."""
    array, data = candidates(logits, ids)
    ll.llama_sampler_apply(chain, ctypes.byref(array))
    left = [(array.data[place].id, array.data[place].logit) for place in range(array.size)]
    left = [(token, logit) for token, logit in left if math.isfinite(logit)]
    best = max(logit for _, logit in left)
    total = math.fsum(math.exp(logit - best) for _, logit in left)
    del data
    return {str(token): round(math.exp(logit - best) / total, 7) for token, logit in sorted(left)}


def plain_case(params: dict[str, Any], seed: int, vocab: Any) -> dict[str, Any]:
    history = random.Random(seed).choices(range(VOCAB), k=20) if "repetition_penalty" in params else []
    chain = sampler_of(params, vocab)
    for token in history:
        ll.llama_sampler_accept(chain, token)
    probs = applied(chain, logits_of(seed, VOCAB))
    ll.llama_sampler_free(chain)
    return {"params": params, "seed": seed, "history": history, "probs": probs}


def dry_case(params: dict[str, Any], text: str, model: Any) -> dict[str, Any]:
    """Over the tokens of the text, all with logit 0: what each of them loses."""
    history = model.tokenize(text.encode(), add_bos=False, special=False)
    ids = sorted(set(history))
    chain = sampler_of(params, ll.llama_model_get_vocab(model.model))
    for token in history:
        ll.llama_sampler_accept(chain, token)
    array, data = candidates([0.0] * len(ids), ids)
    ll.llama_sampler_apply(chain, ctypes.byref(array))
    losses = {str(array.data[place].id): round(-array.data[place].logit, 5) for place in range(array.size)}
    ll.llama_sampler_free(chain)
    del data
    return {"params": params, "text": text, "history": history, "losses": losses}


def mirostat_case(params: dict[str, Any]) -> dict[str, Any]:
    chain = ll.llama_sampler_init_mirostat_v2(7, params["mirostat_tau"], params["mirostat_eta"])
    steps = []
    for seed in range(NUM_MIROSTAT_STEPS):
        array, data = candidates(logits_of(seed, VOCAB))
        ll.llama_sampler_apply(chain, ctypes.byref(array))
        kept = sorted(array.data[place].id for place in range(array.size))
        steps.append({"seed": seed, "kept": kept, "drawn": array.data[array.selected].id})
        del data
    ll.llama_sampler_free(chain)
    return {"params": params, "steps": steps}


def main() -> None:
    path, out = sys.argv[1:]
    model = ll.Llama(path, vocab_only=True, verbose=False)
    vocab = ll.llama_model_get_vocab(model.model)
    plain = [k for k in CHAINS if "dry_multiplier" not in k]
    dry = [k for k in CHAINS if "dry_multiplier" in k]
    recording = {
        "reference": f"llama-cpp-python {ll.__version__}",
        "model": Path(path).name,
        "vocab": VOCAB,
        "cases": [plain_case(params, seed, vocab) for params in plain for seed in range(NUM_SEEDS)],
        "dry": [dry_case(params, text, model) for params in dry for text in DRY_TEXTS],
        "mirostat": [mirostat_case(params) for params in MIROSTAT],
    }
    Path(out).write_text(json.dumps(recording, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
