"""The planner against figures that others published; the source of each stands beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenmill.arch.cost import kv_bytes, num_parameters
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.mtp import mtp_parameters
from tokenmill.arch.spec import ModelSpec
from tokenmill.planner.device import plan_device
from tokenmill.planner.memory import rule_of_thumb_bytes
from tokenmill.planner.model import PlannedModel, find_model
from tokenmill.planner.plan import Question, make_plan
from tokenmill.runner.memory import CPU_INDEX_SCORES, index_bytes

# Qwen2.5-32B, config.json on the hub: Qwen/Qwen2.5-32B.
QWEN_32B = {
    "model_type": "qwen2",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27648,
    "vocab_size": 152064,
}
# "LLaMA: Open and Efficient Foundation Language Models", table 2.
LLAMA_13B = {
    "model_type": "llama",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "intermediate_size": 13824,
    "vocab_size": 32000,
}


def planned(config: dict[str, Any]) -> PlannedModel:
    return PlannedModel("model", spec_from_hf(config), "bfloat16")


def test_qwen2_5_32b() -> None:
    """A widely copied worked example of LLM inference arithmetic, with an H20's 148 TFLOP/s."""
    plan = make_plan(planned(QWEN_32B), plan_device("H20", mfu=1.0, mbu=1.0), Question(1024, 1024)).flat()
    assert plan["params_embedding_once"] / 1e9 == pytest.approx(31.98, abs=0.005)
    assert plan["params_total"] == 32_763_876_352  # the checkpoint's own count: embedding twice, norms and biases
    assert plan["prefill_tflops"] == pytest.approx(65.28, abs=0.005)
    assert round(plan["decode_tflops_per_token"], 2) == 0.06
    assert plan["ttft_s"] == pytest.approx(0.441, abs=0.001)
    assert plan["prefill_tflops_quick"] == pytest.approx(2 * 32.76 * 1.024, rel=1e-3)


def test_memory_of_70b_by_the_rule_of_thumb() -> None:
    """ "Calculating GPU memory for serving LLMs" (substratus.ai, 2023): 70B, 16 bits, 20 % overhead."""
    assert rule_of_thumb_bytes(70e9, 16) / 1e9 == pytest.approx(168)


def test_kv_of_llama_13b() -> None:
    """ "Efficient Memory Management for LLM Serving with PagedAttention" and vLLM's first post: up to 1.7 GB."""
    assert kv_bytes(spec_from_hf(LLAMA_13B), "float16", 2048) / 1e9 == pytest.approx(1.7, abs=0.03)


# Totals are the tensors of the published checkpoints (safetensors index on the hub); active counts are those of the
# model cards, which round them (here: to the digits given). None: a dense model.
PUBLISHED = [
    ("Qwen--Qwen2.5-7B-Instruct", 7_615_616_512, None),
    ("Qwen--Qwen3-0.6B", 596_049_920, None),
    ("Qwen--Qwen3-1.7B", 1_720_574_976, None),
    ("Qwen--Qwen3-8B", 8_190_735_360, None),
    ("Qwen--Qwen3-32B", 32_762_123_264, None),
    ("Qwen--Qwen3-32B-FP8", 32_762_123_264, None),
    ("Qwen--Qwen3-30B-A3B", 30_532_122_624, 3.3),
    ("Qwen--Qwen3-30B-A3B-FP8", 30_532_122_624, 3.3),
    ("Qwen--Qwen3-235B-A22B", 235_093_634_560, 22),
    ("Qwen--Qwen3-235B-A22B-FP8", 235_093_634_560, 22),
    ("Qwen--Qwen3-Coder-480B-A35B-Instruct", 480_154_875_392, 35),
    ("gemma2_9b", 9_241_705_984, None),
    ("gemma3_1b_it", 999_885_952, None),
    ("llama2_70b", 68_976_648_192, None),
    ("meta-llama--Meta-Llama-3.1-8B", 8_030_261_248, None),
    ("meta-llama--Meta-Llama-3.1-70B", 70_553_706_496, None),
    ("meta-llama--Meta-Llama-3.1-405B", 405_853_388_800, None),
    ("mistralai--Mixtral-8x7B-v0.1", 46_702_792_704, 12.9),
    ("mistralai--Mixtral-8x22B-v0.1", 140_620_634_112, 39),
    ("nvidia--Llama-3.1-70B-Instruct-FP8", 70_553_706_496, None),
    ("nvidia--Qwen3-235B-A22B-NVFP4", 235_093_634_560, 22),
    ("phi-3_5", 3_821_079_552, None),
    ("phi-4", 3_836_021_760, None),
]


@pytest.mark.parametrize(("name", "total", "active_b"), PUBLISHED)
def test_published_counts(shared_dir: Path, name: str, total: int, active_b: float | None) -> None:
    files = [shared_dir / "configs" / f"{name}{ending}" for ending in ("_config.json", ".json")]
    model = find_model(str(next(file for file in files if file.is_file())))
    plan = make_plan(model, plan_device("B200"), Question()).flat()
    assert plan["params_total"] == pytest.approx(total, rel=0.005)
    if active_b is None:
        assert plan["params_active"] == plan["params_total"]
    else:
        digits = 1 if isinstance(active_b, float) else 0
        rounding = 0.6 * 10**-digits  # the cards round, some of them down
        assert plan["params_active"] / 1e9 == pytest.approx(active_b, rel=0.005, abs=rounding)


def test_quantised_configs_are_planned_at_their_precision(shared_dir: Path) -> None:
    full = find_model(str(shared_dir / "configs" / "Qwen--Qwen3-32B_config.json"))
    fp8 = find_model(str(shared_dir / "configs" / "Qwen--Qwen3-32B-FP8_config.json"))
    assert (full.stored_dtype, fp8.stored_dtype) == ("bfloat16", "fp8")
    assert fp8.weights("auto").total / full.weights("auto").total == pytest.approx(0.5, abs=0.001)
    packed = find_model(str(shared_dir / "configs" / "moonshotai--Kimi-K2.5_config.json"))
    assert packed.stored_dtype == "int4"  # compressed-tensors' W4A16


ORDERED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
HQQ_ROWS = {"quant_method": "hqq", "quant_config": {"nbits": 4, "group_size": 64, "axis": 0}}


@pytest.mark.parametrize(("quantisation", "cpu", "gpu"), [(ORDERED, 0.5, 0.6016), (NF4, 0.5, 0.6309), (HQQ_ROWS, 2, 2)])
def test_formats_that_devices_keep_otherwise_are_planned_as_each_keeps_them(
    tmp_path: Path, quantisation: dict[str, Any], cpu: float, gpu: float
) -> None:
    """On a GPU nf4 has scales of 4 bytes, act order the places of columns; what HQQ scales along rows is expanded."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_32B, "quantization_config": quantisation}))
    model = find_model(str(tmp_path / "config.json"))
    params = num_parameters(model.spec)
    assert model.weights("auto").total / params == pytest.approx(cpu, rel=0.01)
    assert model.weights("auto", "bfloat16").total / params == pytest.approx(gpu, rel=0.01)


def test_heads_that_predict_further_tokens_are_counted_when_asked_for(shared_dir: Path) -> None:
    """DeepSeek V3's README_WEIGHTS.md: 11.5B parameters beside the shared embedding and head."""
    model = find_model(str(shared_dir / "configs" / "deepseek-ai--DeepSeek-V3_config.json"))
    assert isinstance(model.spec, ModelSpec)
    assert mtp_parameters(model.spec) / 1e9 == pytest.approx(11.5, rel=0.01)
    device = replace(plan_device("Xeon 8380"), available_bytes=2 << 40)
    without, counted = (make_plan(model, device, Question(has_mtp_head=asked)).memory for asked in (False, True))
    assert without.mtp_head == 0 and counted.mtp_head > 11.5e9  # bytes of fp8, and states
    assert counted.weights == without.weights
    per_block = counted.kv_pool / counted.num_blocks - without.kv_pool / without.num_blocks
    assert per_block == pytest.approx(without.kv_pool / without.num_blocks / 61, rel=0.01)  # one layer more


def test_scores_of_sparse_attention_are_counted(shared_dir: Path) -> None:
    model = find_model(str(shared_dir / "configs" / "deepseek-ai--DeepSeek-V3.2_config.json"))
    assert isinstance(model.spec, ModelSpec)
    assert index_bytes(model.spec, 512, 2048, CPU_INDEX_SCORES) == 0  # all is seen
    assert index_bytes(model.spec, 512, 65536, CPU_INDEX_SCORES) == 4 * (CPU_INDEX_SCORES + 512 * 2048)
    assert index_bytes(model.spec, 2, 65536, CPU_INDEX_SCORES) == 4 * (2 * 65536 + 2 * 2048)
    dense = find_model(str(shared_dir / "configs" / "deepseek-ai--DeepSeek-V3_config.json"))
    assert isinstance(dense.spec, ModelSpec) and index_bytes(dense.spec, 512, 65536, CPU_INDEX_SCORES) == 0
