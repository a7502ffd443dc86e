"""The offline benchmark on a tiny model with random weights, from a config alone."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import save_file

from tokenmill.arch.cost import num_parameters
from tokenmill.arch.read import read_spec
from tokenmill.arch.tensors import tensors_of
from tokenmill.bench import offline
from tokenmill.bench.engine_steps import drive, model_clock, random_requests
from tokenmill.bench.offline import OfflineWorkload as Workload
from tokenmill.bench.offline import measure_throughput, open_measured
from tokenmill.bench.traffic import Lengths
from tokenmill.cli import main
from tokenmill.config import EngineConfig, ModelConfig, OpsConfig
from tokenmill.engine.backends import CUDA, TRITON, StoredWeights
from tokenmill.engine.core import EngineCore
from tokenmill.engine.llm import LLM
from tokenmill.engine.resolve import compute_request
from tokenmill.errors import InvalidConfig
from tokenmill.ops.cpu import is_available
from tokenmill.runner.memory import gpu_weight_parts

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def last_json(text: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(text.strip().splitlines()[-1])
    return found


def test_command_prints_results_for_each_concurrency(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--load-format", "dummy", "--input-len", "16", "--output-len", "6", "--concurrency", "1,3"]
    more = ["--threads", "1", "--num-requests", "5", "--no-peaks"]
    assert main(["bench", "offline", str(config_file), *arguments, *more]) == 0
    report = last_json(capsys.readouterr().out)
    results = report["results"]
    assert isinstance(results, list)
    assert [result["concurrency"] for result in results] == [1, 3]
    for result in results:
        assert result["prefill_tok_s"] > 0 and result["decode_tok_s"] > 0
        assert result["decode_steps"] == 5  # of six tokens the first comes from the prompt
        assert 0 < result["host_ms_per_step"] < result["decode_step_ms_p99"]
    throughput = report["throughput"]
    assert isinstance(throughput, dict)
    assert (throughput["input_tokens"], throughput["output_tokens"]) == (5 * 16, 5 * 6)


def test_an_answer_of_one_token_leaves_room_for_warming_up(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--load-format", "dummy", "--input-len", "16", "--output-len", "1", "--concurrency", "2"]
    assert main(["bench", "offline", str(config_file), *arguments, "--threads", "1", "--no-peaks"]) == 0
    (result,) = last_json(capsys.readouterr().out)["results"]  # type: ignore[misc]
    assert result["prefill_tok_s"] > 0 and result["decode_tok_s"] is None


def test_lengths_of_a_batch_job_are_drawn_inputs_first(config_file: Path) -> None:
    config = EngineConfig(ModelConfig(model=str(config_file), load_format="dummy"), ops=OpsConfig(threads=1))
    measured = open_measured(config)
    workload = Workload(Lengths(4, 12), Lengths(2, 5), (), num_requests=9, seed=1)
    found = measure_throughput(measured, workload)
    drawing = random.Random(1)
    inputs, outputs = [drawing.randint(4, 12) for _ in range(9)], [drawing.randint(2, 5) for _ in range(9)]
    assert (found["input_tokens"], found["output_tokens"]) == (sum(inputs), sum(outputs))


def test_steps_are_told_apart_and_the_model_is_put_back(config_file: Path) -> None:
    config = EngineConfig(ModelConfig(model=str(config_file), load_format="dummy"), ops=OpsConfig(threads=1))
    core = open_measured(config).llm.core
    before = core.runner.model  # type: ignore[attr-defined]
    with model_clock(core) as clock:
        run = drive(core, random_requests([20, 20], [4, 8], 300, seed=0, name="t"), clock)
    assert core.runner.model is before  # type: ignore[attr-defined]
    assert run.num_output_tokens == 12 and len(run.first_token_s) == 2
    assert [step.num_new_tokens for step in run.full_decode] == [2, 2, 2]  # until the shorter answer has ended
    assert all(step.host_s is not None and 0 <= step.host_s < step.step_s for step in run.steps)


def test_nothing_is_measured_before_everything_is_prepared(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's graphs are captured when there is time: not in the steps that are measured."""
    left = [True, True, True, False]
    monkeypatch.setattr(EngineCore, "run_idle_task", lambda core: left.pop(0))
    open_measured(EngineConfig(ModelConfig(str(config_file), load_format="dummy")))
    assert not left


def test_wrong_lengths_are_refused() -> None:
    for text in ("0", "9:3", "many", "-1"):
        with pytest.raises(InvalidConfig):
            Lengths.parse(text, "input-len")


def test_weights_that_a_gpu_quantises_count_as_many_bytes_as_it_reads(config_file: Path) -> None:
    """Else a bandwidth twice the memory's own would be reported."""
    spec = read_spec(config_file)
    found = {}
    for quantization in ("none", "fp8", "int4"):
        config = EngineConfig(ModelConfig(model=str(config_file), load_format="dummy", quantization=quantization))
        request = compute_request(config, spec, CUDA, TRITON)
        found[quantization] = TRITON.kept_weights(StoredWeights(spec, None), request)
    wide = replace(spec, hidden_size=256)
    assert [kept.dtype for kept in found.values()] == ["float32", "fp8", "int4"]
    assert found["fp8"].parts == gpu_weight_parts(spec, 2, "fp8")
    assert gpu_weight_parts(wide, 2, "fp8").rest < 0.6 * gpu_weight_parts(wide, 2).rest


FILE = "model.safetensors"
HF_NAMES = {
    **{part: f"self_attn.{part}_proj" for part in "qkvo"},
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def hf_name(name: str) -> str:
    if not name.startswith("layers."):
        return "model." + {"embed.weight": "embed_tokens.weight", "final_norm.weight": "norm.weight"}[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{HF_NAMES[part]}.{kind}"


@pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
@pytest.mark.parametrize(("quantization", "dtype", "value_bytes"), [("none", "bfloat16", 2), ("int8", "int8", 34 / 32)])
def test_weights_that_a_cpu_keeps_as_they_are_stored_count_as_such(
    tmp_path: Path, quantization: Literal["none", "int8"], dtype: str, value_bytes: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "torch_dtype": "bfloat16"}))
    spec = read_spec(tmp_path)
    save_file({hf_name(t.name): torch.zeros(t.shape).bfloat16() for t in tensors_of(spec).values()}, tmp_path / FILE)
    llm = LLM(EngineConfig(ModelConfig(model=str(tmp_path), quantization=quantization), ops=OpsConfig(threads=1)))
    parts, found = offline.stored_weights(llm)
    assert found == dtype
    assert parts.total == pytest.approx(num_parameters(spec) * value_bytes, rel=0.02)
    assert parts.total <= (tmp_path / FILE).stat().st_size
