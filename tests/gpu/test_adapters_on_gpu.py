"""Adapters on a real GPU: trained ones answer as recorded, many in one batch, through captured graphs and chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.random_adapters import llama_shapes, plain_config, write_adapter
from tests.support.trained_models import GREEDY, golden_cases, num_equal_tokens
from tokenmill import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
TRAINED = ("dora_r8_robots", "lora_pattern_reversed", "lora_r8_upper", "rslora_r16_bang")
SIZES = {"q_proj": (64, 64), "v_proj": (32, 64), "down_proj": (64, 172)}
ONCE = "Once upon a time"


@pytest.mark.parametrize("deterministic", [False, True])
def test_trained_adapters_answer_as_recorded(deterministic: bool, stories_dir: Path, shared_dir: Path) -> None:
    root = shared_dir / "goldens" / "tiny" / "adapters"
    llm = LLM(
        stories_dir,
        device="cuda",
        dtype="float32",
        deterministic=deterministic,
        adapters={name: root / name for name in TRAINED},
        token_budget=96,
        max_running=24,
        num_blocks=400,
    )
    asked = [(name, case) for name in TRAINED for case in golden_cases(root / name)[:6]]
    asked += [(None, case) for case in golden_cases(stories_dir.parent)[:6]]
    cases, names = [case for _, case in asked], [name for name, _ in asked]
    answers = llm.generate([case["prompt_ids"] for case in cases], GREEDY, adapter=names, progress=False)
    assert num_equal_tokens(cases, answers, 4e-3) > 1000
    plain = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)  # drawn in graphs
    prompts = [case["prompt_ids"] for case in cases]
    drawn = llm.generate(prompts, plain, adapter=names, progress=False)
    same = sum(
        one.outputs[0].token_ids == other.outputs[0].token_ids[:40] for one, other in zip(drawn, answers, strict=True)
    )
    assert same >= (len(drawn) if deterministic else len(drawn) - 3)  # a close call may fall either way


def test_few_slots_and_reloading_give_the_tokens_of_each_alone(stories_dir: Path, tmp_path: Path) -> None:
    folders = {}
    for number in range(8):
        rank = (1, 8, 17, 32)[number % 4]
        config = plain_config(r=rank, lora_alpha=rank, target_modules=list(SIZES))
        folders[f"a{number}"] = write_adapter(tmp_path / f"a{number}", config, llama_shapes(SIZES, 5, rank))
    settings = {"device": "cuda", "dtype": "float32", "deterministic": True, "num_blocks": 400}
    llm = LLM(stories_dir, adapters=folders, adapter_slots=3, max_running=16, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    names: list[str | None] = [f"a{number % 8}" if number % 9 else None for number in range(40)]
    prompts = [f"{ONCE} number {number}" for number in range(40)]
    together = llm.generate(prompts, params, adapter=names, progress=False)
    alone = [llm.generate(p, params, adapter=n, progress=False)[0] for p, n in zip(prompts, names, strict=True)]
    assert [one.outputs[0].token_ids for one in together] == [one.outputs[0].token_ids for one in alone]
