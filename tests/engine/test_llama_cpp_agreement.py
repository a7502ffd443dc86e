"""Real GGUF files against llama.cpp: its recorded greedy continuations are fed to us, and where it was sure
(margin above 0.3) our most likely token must be its own. `tests/goldens/record_llama_cpp.py` made the recordings.

llama.cpp rounds activations to 8 bits, so we do the same here. At 16 bits, our default for small models, we follow the
exact arithmetic (tests/ops_cpu) and differ from llama.cpp in a token or two of 640 where it was barely sure.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_models import fetched_model

from tokenmill import LLM, SamplingParams
from tokenmill.ops.cpu import is_available

RECORDINGS = Path(__file__).parents[1] / "goldens"
SURE = 0.3
# Known and unexplained: margins of 0.31, 0.32 and 0.53; the torch reference misses the first two but not the third.
TINYLLAMA = pytest.param(
    "tinyllama", marks=[pytest.mark.slow, pytest.mark.xfail(strict=True, reason="3 positions of IQ2_XXS differ")]
)


@pytest.mark.parametrize(
    "name",
    ["smollm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "qwen-coder")), TINYLLAMA],
)
def test_top_token_agrees_where_llama_cpp_is_sure(
    name: str, shared_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = json.loads((RECORDINGS / f"{name}.json").read_text())
    llm = LLM(str(fetched_model(shared_dir, name)), max_context=512, num_blocks=600, activation_bits="8")
    agreed = sure = total = 0
    missed = []
    cases = recording["cases"]
    prompts = [case["prompt_ids"] + case["ids"] for case in cases]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1))
    for case, answer in zip(cases, answers, strict=True):
        assert answer.prompt_logprobs is not None, answer.error
        predicted = answer.prompt_logprobs[len(case["prompt_ids"]) :]
        for token_id, margin, info in zip(case["ids"], case["margins"], predicted, strict=True):
            assert info is not None
            total += 1
            agreed += info.top[0][0] == token_id
            if margin > SURE:
                sure += 1
                if info.top[0][0] != token_id:
                    missed.append((case["prompt"], margin, info))
    with capsys.disabled():
        print(
            f"\n{name}: top-1 agreement {agreed}/{total} ({agreed / total:.1%}), {sure - len(missed)}/{sure} where sure"
        )
    assert len(missed) <= (0 if is_available()[0] else sure // 100), missed


def test_prompt_ids_equal_llama_cpps(smollm2_path: Path) -> None:
    from tokenmill.engine.front import tokenizer_of

    tokenizer = tokenizer_of(smollm2_path)
    assert tokenizer is not None
    for case in json.loads((RECORDINGS / "smollm2.json").read_text())["cases"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
