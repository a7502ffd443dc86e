"""Families and real models over several numbers of ranks: the same ids and logprobs as on one, hashed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.hybrids import RANDOM, story, tiny
from tests.support.real_models import fetched_model
from tokenmill import LLM, SamplingParams
from tokenmill.arch.read import read_spec
from tokenmill.errors import InvalidConfig
from tokenmill.ops.cpu import is_available
from tokenmill.parallel.cuts import parting_limits

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_available()[0], reason=is_available()[1])]
FAMILIES = (
    "deepseek_v2", "deepseek_v3", "deepseek_v4", "exaone4", "falcon_h1", "gemma3n", "gemma4", "gemma4_moe", "glm4_moe",
    "gpt_oss", "granitemoehybrid", "lfm2", "lfm2_moe", "llama4", "minimax_m2", "mixtral", "nemotron_h", "olmo3",
    "qwen3_5_moe", "qwen3_moe", "qwen3_next", "smollm3",
)  # fmt: skip
TOPOLOGIES: tuple[dict[str, Any], ...] = (
    {"tp": 2}, {"tp": 3}, {"tp": 4}, {"pp": 2}, {"pp": 3}, {"tp": 2, "pp": 2},
    {"tp": 2, "ep": True}, {"tp": 4, "ep": True}, {"tp": 2, "dp_attention": True},
    {"tp": 4, "dp_attention": True}, {"tp": 2, "ep": True, "dp_attention": True},
)  # fmt: skip
WITHOUT_STAGES = ("deepseek_v4", "gemma3n", "gemma4")  # several streams, or layers with embeddings of their own
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 2}
PARAMS = (
    SamplingParams(**GREEDY),
    SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=7, n=3, ignore_eos=True),
    SamplingParams(max_tokens=8, temperature=0.7, repetition_penalty=1.2, prompt_logprobs=1, seed=5, ignore_eos=True),
)
SETTINGS: dict[str, Any] = {"threads": 1, "num_blocks": 400, "max_context": 256, "backend": "cpu"}


def digest(llm: LLM, prompts: list[Any], num_params: int = len(PARAMS)) -> str:
    """All ids and logprobs, hashed."""
    found = hashlib.sha256()
    for params in PARAMS[:num_params]:
        for output in llm.generate(prompts, params, progress=False):
            found.update(repr(output.prompt_logprobs).encode())
            for answer in output.outputs:
                found.update(repr((list(answer.token_ids), answer.logprobs, answer.cumulative_logprob)).encode())
    return found.hexdigest()


@pytest.mark.parametrize("link", ["threads", "shared"])
@pytest.mark.parametrize("name", [*FAMILIES, *RANDOM])
def test_every_family_says_the_same_on_any_number_of_ranks(shared_dir: Path, name: str, link: str) -> None:
    path = str(tiny(shared_dir, name))
    prompts = [story(length, seed=length) for length in (5, 17, 70)]
    expected = digest(LLM(path, **SETTINGS), prompts)
    for ranks in TOPOLOGIES:
        if "pp" in ranks and name in WITHOUT_STAGES:
            with pytest.raises(InvalidConfig, match="pp"):
                LLM(path, link=link, **ranks, **SETTINGS)
            continue
        if "ep" in ranks and not read_spec(Path(path)).experts:
            continue
        if "dp_attention" in ranks and parting_limits(read_spec(Path(path))) is not None:
            with pytest.raises(InvalidConfig, match="dp_attention"):
                LLM(path, link=link, **ranks, **SETTINGS)
            continue
        assert digest(LLM(path, link=link, **ranks, **SETTINGS), prompts) == expected, str(ranks)


@pytest.mark.parametrize(("model", "kv_dtype"), [("smollm2", "auto"), ("smollm2", "int8"), ("gemma3", "auto")])
def test_real_models_say_the_same_on_any_number_of_ranks(shared_dir: Path, model: str, kv_dtype: str) -> None:
    path = str(fetched_model(shared_dir, model))
    prompts = ["The capital of France is", "def fibonacci(n):"]
    settings = {**SETTINGS, "kv_dtype": kv_dtype}
    expected = digest(LLM(path, **settings), prompts, num_params=2)
    several: tuple[dict[str, Any], ...] = (
        {"tp": 2}, {"tp": 3, "link": "threads"}, {"tp": 4}, {"pp": 2}, {"pp": 3, "link": "threads"}, {"tp": 2, "pp": 2},
        {"tp": 2, "dp_attention": True},
    )  # fmt: skip
    for ranks in several:
        assert digest(LLM(path, **ranks, **settings), prompts, num_params=2) == expected, str(ranks)
