"""Record what llama.cpp says about a GGUF file: greedy continuations with the margin of each choice.

    python tests/goldens/record_llama_cpp.py MODEL.gguf OUT.json [--exact]      (needs llama-cpp-python)

The recording is the truth that `test_llama_cpp_agreement.py` compares with; each token is llama.cpp's own choice, and
`margin` is how far its logit stood above the second best.

On quantised weights llama.cpp rounds activations to 8 bits, for formats in blocks of 256 with one scale for all 256
values. `--exact` lets llama.cpp expand the file to float32 first: the same weights, computed without rounding.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colors are",
    "In 1969, the first humans",
    "To make a good cup of tea, you should",
    "The mitochondria is the",
    "Q: What is 12 times 12?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "import numpy as np\n\n",
    "She opened the door and saw",
    "El perro es un animal que",
    "The largest planet in our solar system is",
    "Roses are red,\nviolets are blue,",
    "A list of healthy breakfast foods:\n1.",
    "Shakespeare wrote many plays, such as",
    "The best way to learn a new language is",
]
NUM_TOKENS = 32


def continuation(llm: llama_cpp.Llama, prompt: str) -> dict[str, object]:
    prompt_ids = llm.tokenize(prompt.encode(), add_bos=True, special=True)
    llm.reset()
    llm.eval(prompt_ids)
    ids, margins = [], []
    for _ in range(NUM_TOKENS):
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),))
        second, best = np.argsort(logits)[-2:]
        ids.append(int(best))
        margins.append(round(float(logits[best] - logits[second]), 4))
        llm.eval([int(best)])
    return {"prompt": prompt, "prompt_ids": list(prompt_ids), "ids": ids, "margins": margins}


def expand_to_float32(model: str, out: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
    if llama_cpp.llama_model_quantize(model.encode(), out.encode(), ctypes.byref(params)) != 0:
        raise SystemExit(f"llama.cpp could not expand {model}")


def record(model: str, out: str, name: str) -> None:
    llm = llama_cpp.Llama(model, n_ctx=512, verbose=False, n_threads=1, seed=0)
    cases = [continuation(llm, prompt) for prompt in PROMPTS]
    recording = {"model": name, "reference": f"llama-cpp-python {llama_cpp.__version__}", "cases": cases}
    Path(out).write_text(json.dumps(recording, indent=None, separators=(",", ":")) + "\n")


def main() -> None:
    model, out, *options = sys.argv[1:]
    if options != ["--exact"]:
        record(model, out, Path(model).name)
        return
    with tempfile.TemporaryDirectory() as folder:
        expanded = f"{folder}/float32.gguf"
        expand_to_float32(model, expanded)
        record(expanded, out, f"{Path(model).name}, expanded to float32")


if __name__ == "__main__":
    main()
