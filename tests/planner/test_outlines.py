"""Models that are planned but not run: their outlines against transformers' own modules, and against published figures.

Every family is built by transformers at a small size, without memory (on torch's meta device), and counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tokenmill.arch.cost import kv_bytes, kv_bytes_per_token, num_active_parameters, num_parameters, prefill_flops
from tokenmill.arch.families import BY_MODEL_TYPE
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.outline import outline_of
from tokenmill.arch.outlines import LAYERS, outline_from_hf
from tokenmill.errors import UnsupportedModel
from tokenmill.planner.device import plan_device
from tokenmill.planner.memory import Split
from tokenmill.planner.model import find_model, model_from_config
from tokenmill.planner.plan import Question, make_plan

SMALL = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512}  # fmt: skip
LATENT = {**SMALL, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16,
          "qk_rope_head_dim": 8, "v_head_dim": 24, "n_routed_experts": 8, "n_shared_experts": 2,
          "moe_intermediate_size": 40, "num_experts_per_tok": 2, "first_k_dense_replace": 2, "n_group": 1,
          "topk_group": 1}  # fmt: skip
SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
          "shared_expert_intermediate_size": 56}  # fmt: skip
DELTA = {"layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"], "head_dim": 24,
         "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_value_head_dim": 16}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": LATENT,
    "glm_moe_dsa": {**LATENT, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8},
    "glm4_moe": {**SMALL, "head_dim": 24, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 8,
                 "n_shared_experts": 1, "moe_intermediate_size": 40, "num_experts_per_tok": 2,
                 "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "gpt_oss": {**SMALL, "head_dim": 24, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
    "llama4_text": {**SMALL, "head_dim": 24, "intermediate_size_mlp": 112, "num_local_experts": 4,
                    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 64},
    "minimax_m2": {**SMALL, "head_dim": 24, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {**SMALL, **SPARSE, "decoder_sparse_step": 2},
    "qwen3_5_text": {**SMALL, **DELTA},
    "qwen3_5_moe_text": {**SMALL, **DELTA, **SPARSE},
    "nemotron_h": {**SMALL, "hybrid_override_pattern": "ME*M-", "head_dim": 24, "mamba_num_heads": 4,
                   "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "n_routed_experts": 8,
                   "n_shared_experts": 1, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 72,
                   "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "mimo_v2_flash": {**SMALL, "head_dim": 24, "v_head_dim": 16, "swa_num_key_value_heads": 4, "n_routed_experts": 8,
                      "num_experts_per_tok": 2, "moe_intermediate_size": 40, "sliding_window": 16},
}  # fmt: skip
BLOCK_SPARSE = {**SMALL, "head_dim": 24, "dense_intermediate_size": 112, "num_local_experts": 8,
                "num_experts_per_tok": 2, "shared_intermediate_size": 56, "moe_layer_freq": [0, 1, 1, 1, 1],
                "sparse_attention_config": {"sparse_attention_freq": [0, 0, 1, 1, 1], "sparse_index_dim": 24,
                                            "sparse_num_index_heads": 2, "sparse_block_size": 8}}  # fmt: skip
HEAD_GATES = {**SMALL, "head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
              "share_expert_dim": 48, "first_k_dense_replace": 3, "sliding_window": 16,
              "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
              "attention_other_setting": {"num_attention_heads": 6}}  # fmt: skip


@pytest.mark.parametrize("model_type", CONFIGS)
def test_counts_are_those_of_transformers(model_type: str) -> None:
    asked = {**CONFIGS[model_type], "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(model_type, **asked)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    counted = {name: parameter.numel() for name, parameter in module.named_parameters()}
    if model_type in BY_MODEL_TYPE:  # biases of routers are no parameters there
        counted |= {name: value.numel() for name, value in module.named_buffers() if "correction_bias" in name}
    outline = outline_of(outline_from_hf({"model_type": model_type, **asked}))
    assert num_parameters(outline) == sum(counted.values()), sorted(counted.items())
    idle = sum(size for name, size in counted.items() if ".experts." in name)
    experts = sum(layer.experts for layer in outline.layers)
    assert experts == idle


def test_phi_counts_are_those_of_transformers() -> None:
    config = transformers.PhiConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256
    )
    with torch.device("meta"):
        module = transformers.PhiForCausalLM(config)
    asked = {"vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048}
    assert num_parameters(outline_from_hf({"model_type": "phi-msft", **asked})) == module.num_parameters()


@pytest.mark.parametrize("model_type", ["minimax_m3", "step3p7"])
def test_parts_that_read_text_are_counted_as_transformers_does(model_type: str) -> None:
    """Models that see too"""
    if model_type == "step3p7":
        from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel as Module

        asked, head = HEAD_GATES, SMALL["vocab_size"] * SMALL["hidden_size"]
        config = transformers.AutoConfig.for_model("step3p7", text_config=asked).text_config
    else:
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM as Module

        asked, head = BLOCK_SPARSE, 0
        config = transformers.AutoConfig.for_model("minimax_m3_vl_text", **asked, bos_token_id=None, eos_token_id=None)
    with torch.device("meta"):
        module = Module(config)
    biases = sum(value.numel() for name, value in module.named_buffers() if "correction_bias" in name)
    assert num_parameters(outline_from_hf({"model_type": model_type, **asked})) == (
        module.num_parameters() + biases + head
    )


def test_every_family_is_compared_with_something() -> None:
    same = {"deepseek_v32", "kimi_k2", "llama4", "qwen3_5", "qwen3_5_moe", "phi-msft"}
    published = {"kimi_k3", "nemotron-nas"}
    assert set(LAYERS) <= set(CONFIGS) | same | published


def test_a_config_with_endless_layers_is_refused() -> None:
    sizes = {"n_embd": 64, "vocab_size": 10, "n_head": 2, "n_positions": 8}
    with pytest.raises(UnsupportedModel, match="layers"):
        outline_from_hf({"model_type": "phi-msft", **sizes, "n_layer": 2**30})


def test_odd_configs_are_completed_or_refused(shared_dir: Path, tmp_path: Path) -> None:
    def planned(name: str, **changes: Any) -> dict[str, Any]:
        config = json.loads((shared_dir / "configs" / f"{name}_config.json").read_text())
        config.get("text_config", config).update(changes)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return make_plan(model_from_config(tmp_path / "config.json", name), plan_device("H200"), Question()).flat()

    whole, bare = planned("Qwen--Qwen3.5-35B-A3B"), planned("Qwen--Qwen3.5-35B-A3B", layer_types=None)
    assert whole["params_total"] == bare["params_total"] and whole["kv_bytes_per_token"] == bare["kv_bytes_per_token"]
    with pytest.raises(UnsupportedModel, match="8 experts per token are not possible with 1"):
        planned("deepseek-ai--DeepSeek-V3", n_routed_experts=1)
    with pytest.raises(UnsupportedModel, match="lists any layers"):
        planned("nvidia--Nemotron-H-56B-Base-8K", hybrid_override_pattern="")
    states = planned("nvidia--Nemotron-H-56B-Base-8K", hybrid_override_pattern="M-" * 59)
    assert states["kv_bytes_per_token"] == 0 < states["kv_bytes_per_request"] and states["kv_pool_blocks"] > 0


def test_the_engine_refuses_by_name_what_is_only_planned() -> None:
    for model_type in set(LAYERS) - set(BY_MODEL_TYPE):  # what the engine has learnt since is a spec
        with pytest.raises(UnsupportedModel, match=model_type):
            spec_from_hf({"model_type": model_type, **CONFIGS.get(model_type, SMALL)})


# Total and active parameters in billions, and whether the published active count has the input embedding in it.
#   gpt-oss: "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv 2508.10925), table 1
#   DeepSeek-V3: technical report (arXiv 2412.19437), abstract; V3.2 adds the indexer to it
#   Kimi K2: the size that its page on the hub shows, 1,026 B; "32 billion activated" (arXiv 2507.20534)
#   Llama 4: model cards; totals here are of the text model, the cards' 109 and 402 B have the vision tower in them
#   GLM-5, MiniMax-M2, Qwen3.5, Nemotron 3 Nano: model cards and names, rounded (some of them down)
#   Phi-1.5, Phi-2 and Nemotron Super: sizes shown on the hub; Phi-3.5-vision: the text model's, Phi-3-mini's size
#   MiniMax-M3, MiMo-V2, Step 3.5: model cards (M3's 428 B have the part that sees in them, its 23 B active ones
#   neither embedding nor head)
PUBLISHED = [
    ("openai--gpt-oss-120b", 116.83, 5.13, False),
    ("openai--gpt-oss-20b", 20.91, 3.61, False),
    ("deepseek-ai--DeepSeek-V3", 671, 37, False),
    ("deepseek-ai--DeepSeek-R1", 671, 37, False),
    ("deepseek-ai--DeepSeek-V3.2", 671, 37, False),
    ("nvidia--DeepSeek-V3.1-NVFP4", 671, 37, False),
    ("moonshotai--Kimi-K2-Instruct", 1026, 32, False),
    ("moonshotai--Kimi-K2.5", 1026, 32, False),
    ("meta-llama--Llama-4-Scout-17B-16E-Instruct", 107.8, 17, True),
    ("meta-llama--Llama-4-Maverick-17B-128E-Instruct", 400.7, 17, True),
    ("zai-org--GLM-5", 744, 40, False),
    ("MiniMaxAI--MiniMax-M2.5", 229, 10, False),
    ("Qwen--Qwen3.5-122B-A10B", 122, 10, True),
    ("Qwen--Qwen3.5-397B-A17B", 397, 17, True),
    ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6, 3.6, True),
    ("MiniMaxAI--MiniMax-M3", 428, None, True),
    ("XiaomiMiMo--MiMo-V2-Flash", 309, 15, False),
    ("nvidia--Llama-3_3-Nemotron-Super-49B-v1", 49.9, None, True),
    ("stepfun-ai--Step-3.7-Flash", 196, 11, True),
    ("phi-3_5-vision", 3.82, None, True),
    ("phi-1_5", 1.42, None, True),
    ("phi-2", 2.78, None, True),
]


@pytest.mark.parametrize(("name", "total_b", "active_b", "has_embedding"), PUBLISHED)
def test_published_figures(
    shared_dir: Path, name: str, total_b: float, active_b: float | None, has_embedding: bool
) -> None:
    files = [shared_dir / "configs" / f"{name}{ending}" for ending in ("_config.json", ".json")]
    model = find_model(str(next(file for file in files if file.is_file()))).spec
    assert num_parameters(model) / 1e9 == pytest.approx(total_b, rel=0.005)
    if active_b is not None:
        active = num_active_parameters(model) - (0 if has_embedding else model.vocab_size * model.hidden_size)
        digit = 10 ** -len(str(active_b).partition(".")[2])  # cards round to it, some of them down
        assert 0.995 * active_b - digit / 2 <= active / 1e9 < 1.005 * active_b + digit


def test_weights_of_gpt_oss_are_as_large_as_its_files(shared_dir: Path) -> None:
    """Checkpoint sizes of the model card: 60.8 and 12.8 GiB."""
    for name, gib in (("openai--gpt-oss-120b", 60.8), ("openai--gpt-oss-20b", 12.8)):
        model = find_model(str(shared_dir / "configs" / f"{name}_config.json"))
        assert model.weights("auto").total / 2**30 == pytest.approx(gib, rel=0.005)


def test_a_latent_vector_is_all_that_is_kept(shared_dir: Path) -> None:
    """DeepSeek-V3 keeps 70 kB a token ("Insights into DeepSeek-V3", arXiv 2505.09343, table 1: 70.272 KB)."""
    model = find_model(str(shared_dir / "configs" / "deepseek-ai--DeepSeek-V3_config.json"))
    assert kv_bytes_per_token(model.spec, "bfloat16") == 70_272
    plan = make_plan(model, plan_device("H200"), Question(split=Split(8)))
    assert plan.memory.fits and plan.memory.kv_per_request == pytest.approx(2048 * 70_272, rel=0.001)  # not split
    assert prefill_flops(model.spec, 1, num_logits=0) / 1e9 == pytest.approx(2 * 35.7, rel=0.01)


def test_windows_and_states_bound_what_is_kept(shared_dir: Path) -> None:
    def kept(name: str, context: int) -> int:
        model = find_model(str(shared_dir / "configs" / f"{name}_config.json"))
        return kv_bytes(model.spec, "bfloat16", context)

    oss = [kept("openai--gpt-oss-20b", context) for context in (128, 256, 4096)]
    assert oss[1] - oss[0] == oss[0] // 2 and oss[2] == oss[0] // 2 * 33  # half of the layers keep 128 tokens
    qwen = [kept("Qwen--Qwen3.5-35B-A3B", context) for context in (1, 1001)]
    assert qwen[1] - qwen[0] == 1000 * 2 * 2 * 256 * 2 * 10 and qwen[0] > 30 * 32 * 128 * 128 * 2
