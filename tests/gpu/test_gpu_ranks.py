"""Several ranks of a model on one GPU, in processes under CUDA MPS: their tokens are one rank's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu_rank_program import params_of
from tests.support.tiny_models import VOCAB, make_reference
from tokenmill import LLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="there is no CUDA MPS"),
    pytest.mark.filterwarnings("default"),
]
LIMIT_S = 150
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1},
    {"temperature": 0.8, "min_p": 0.02, "frequency_penalty": 0.5},
    {"temperature": 0.8, "typical_p": 0.8},  # drawn by the host
    {"temperature": 0.8, "logprobs": 2, "top_p": 0.7},  # likewise
]
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_context": 200, "max_running": 4, "token_budget": 48, "num_blocks": 200, "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def mps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of processes that share the GPU."""
    folder = str(tmp_path_factory.mktemp("mps"))
    env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True, timeout=30)
    yield env
    subprocess.run(["nvidia-cuda-mps-control"], input=b"quit -t 5\n", env=env, check=False, timeout=60)


def prompts(count: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(1)
    lengths = (1, 5, 17, 40, 63, 9, 100)
    return [torch.randint(3, VOCAB, (lengths[n % len(lengths)],), generator=rng).tolist() for n in range(count)]


def answers(
    model: Path, env: dict[str, str], params: list[dict[str, Any]], asked: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """`asked`: what else the program is asked for."""
    asked = {
        "model": str(model), "settings": {**SETTINGS, **settings}, "prompts": prompts(len(params)), "params": params,
        **(asked or {}),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.gpu_rank_program"],
        input=json.dumps(asked), env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not found["errors"]
    return found


def test_two_ranks_draw_the_tokens_of_the_reference(tmp_path: Path, mps: dict[str, str]) -> None:
    """Greedy, sampled, with penalties, drawn by the host; more rows than seats, and chunks beside decoding rows."""
    make_reference("qwen3").save_pretrained(tmp_path)
    params = [*PARAMS, *PARAMS[:2]]
    found = answers(tmp_path, mps, params, tp=2, rank_gpus="0,0")
    reference = LLM(str(tmp_path), device="cpu", backend="reference", **SETTINGS)
    expected = reference.generate(prompts(len(params)), list(map(params_of, params)), progress=False)
    assert found["tokens"] == [one.outputs[0].token_ids for one in expected]


def test_bits_do_not_depend_on_the_number_of_ranks(tmp_path: Path, mps: dict[str, str]) -> None:
    make_reference("llama").save_pretrained(tmp_path)
    params = [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.0, "logprobs": 3}]
    settings = {"dtype": "bfloat16", "deterministic": True}
    one = answers(tmp_path, mps, params, **settings)
    two = answers(tmp_path, mps, params, tp=2, rank_gpus="0,0", **settings)
    assert one["logprobs"][2] and one == two


def test_streams_go_on_when_a_rank_is_killed(tmp_path: Path, mps: dict[str, str]) -> None:
    """Kernels of the other rank wait for it in the middle of a step: the group ends, is started again, and answers go
    on with the tokens that they would have had."""
    make_reference("llama").save_pretrained(tmp_path)
    params = [{"temperature": 0.0, "max_tokens": 90}, {"temperature": 0.8, "max_tokens": 90}, {"temperature": 0.0}]
    found = answers(tmp_path, mps, params, {"kill_after": 30}, tp=2, rank_gpus="0,0")
    reference = LLM(str(tmp_path), device="cpu", backend="reference", **SETTINGS)
    expected = reference.generate(prompts(len(params)), list(map(params_of, params)), progress=False)
    assert found["tokens"] == [one.outputs[0].token_ids for one in expected]


def test_adapters_are_cut_like_their_matrices(mps: dict[str, str], stories_dir: Path, shared_dir: Path) -> None:
    root = shared_dir / "goldens" / "tiny" / "adapters"
    trained = {name: str(root / name) for name in ("dora_r8_robots", "lora_pattern_reversed", "rslora_r16_bang")}
    names = [None, *trained]
    params: list[dict[str, Any]] = [{"temperature": 0.0}] * len(names)
    settings = {"adapters": trained, "adapter_slots": 2}  # fewer slots than adapters: they are exchanged
    found = answers(stories_dir, mps, params, {"adapter": names}, tp=2, rank_gpus="0,0", **settings)
    reference = LLM(str(stories_dir), device="cpu", backend="reference", **{**SETTINGS, **settings})
    expected = reference.generate(prompts(len(names)), list(map(params_of, params)), adapter=names, progress=False)
    assert found["tokens"] == [one.outputs[0].token_ids for one in expected]


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_stages_draw_the_tokens_of_the_reference(tmp_path: Path, mps: dict[str, str], deterministic: bool) -> None:
    make_reference("qwen3").save_pretrained(tmp_path)
    params = [*PARAMS, *PARAMS[:2]]
    stages = {"pp": 2, "rank_gpus": "0,0", "deterministic": deterministic}
    found = answers(tmp_path, mps, params, **stages)
    reference = LLM(str(tmp_path), device="cpu", backend="reference", **SETTINGS)
    expected = reference.generate(prompts(len(params)), list(map(params_of, params)), progress=False)
    assert found["tokens"] == [one.outputs[0].token_ids for one in expected]
