"""`tokenmill doctor --kernels`: which GPU kernels would compute a model, on machines without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.triton_inputs import random_raw
from tokenmill.arch.packed_formats import StoredFormat
from tokenmill.cli import main
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.triton.describe import PlannedWeights, planned_form

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_MOE: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip


def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], *flags: str) -> dict[str, str]:
    """The first lines by their key, and each section's text by its title"""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["doctor", "--kernels", str(path), *flags]) == 0
    first, *sections = capsys.readouterr().out.rstrip().split("\n\n")
    found = dict(line.split(maxsplit=1) for line in first.splitlines())
    return found | {section.splitlines()[0]: section for section in sections}


def test_every_matrix_attention_and_head_of_a_dense_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(tmp_path, capsys, LLAMA, "--device", "H200")
    assert found["tuning"] == "H200: measured"
    matrices = [title for title in found if title.endswith("bfloat16")]
    assert matrices == [
        "qkv [6144, 4096] bfloat16",
        "o [4096, 4096] bfloat16",
        "gate_up [28672, 4096] bfloat16",
        "down [4096, 14336] bfloat16",
        "head [128256, 4096] bfloat16",
    ]
    lines = [" ".join(line.split()) for line in found["gate_up [28672, 4096] bfloat16"].splitlines()[1:]]
    assert [line.split(" (")[0] for line in lines] == [
        "rows 1 gemv, then its gate",
        "rows 2 to 32 splitk, then its gate",
        "rows 33 to 128 hopper_gemm with its gate in graphs, cublas, then its gate otherwise",
        "rows 129 to 767 cublas, then its gate",
        "rows 768 to 4,096 gated_gemm with its gate",
    ]
    assert "cublas_add" in found["down [4096, 14336] bfloat16"]
    decode = next(text for title, text in found.items() if title.startswith("attention of decoding rows"))
    assert "fused_decode, 32 splits" in decode and "rows 33 to 4,096" in decode
    prompt = next(text for title, text in found.items() if title.startswith("attention of a whole prompt"))
    assert "1,024 to 4,096  dense_prefill" in prompt


@pytest.mark.parametrize("device", ["A100", "L4", "RTX4090"])
def test_other_gpus_have_rows_that_say_where_they_come_from(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask(tmp_path, capsys, QWEN_MOE, "--device", device, "--quantization", "int4")
    assert found["tuning"].endswith("derived from H200")
    experts = next(text for title, text in found.items() if title.startswith("experts 128"))
    assert "moe_gemv" in experts and "grouped_gemm_int" in experts and "expand_grouped_gemm" in experts
    everything = "\n".join(found.values())
    assert "hopper" not in everything and "splitk_int" in everything and "gemv_int4" in everything


def test_shared_experts_and_mxfp4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = Path(__file__).resolve().parents[2] / "benchmarks" / "shapes"
    latent = json.loads((shapes / "deepseek-v2-lite" / "config.json").read_text())
    plain = ask(tmp_path, capsys, latent, "--device", "H200")
    assert any(title.endswith("6 a token, and 2 for all tokens") for title in plain)
    assert not any(title.startswith("shared") for title in plain)
    assert "norm_gemv" in plain["kv_down [576, 2048] bfloat16"]
    rounded = ask(tmp_path, capsys, latent, "--device", "H200", "--quantization", "int8")
    assert any(title.startswith("shared.gate_up") for title in rounded)
    oss = ask(tmp_path, capsys, json.loads((shapes / "gpt-oss-20b" / "config.json").read_text()), "--device", "H200")
    assert "grouped_gemm_fp4" in oss["experts 32 × [5760, 2880] mxfp4, 4 a token"]


def test_a_gpu_without_a_row_says_whose_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(tmp_path, capsys, LLAMA, "--device", "H100")
    assert found["tuning"] == "no row for H100 (9.0): that of H200, the nearest compute capability"
    assert "hopper_gemm" in found["qkv [6144, 4096] bfloat16"]
    assert main(["doctor", "--kernels", str(tmp_path / "config.json"), "--device", "H999"]) != 0
    assert "known GPUs" in capsys.readouterr().err
    assert main(["doctor", "--device", "H200"]) != 0


def test_other_gpus_than_hopper_keep_floats_of_4_bits_as_integers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheme = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    config = LLAMA | {"quantization_config": scheme}
    title = "qkv [6144, 4096] "
    assert "hopper_gemm_fp4" in ask(tmp_path, capsys, config, "--device", "H200")[f"{title}nvfp4"]
    for gpu in ("A100", "L4"):
        found = ask(tmp_path, capsys, config, "--device", gpu)
        assert "splitk_int" in found[f"{title}int8"] and not any("fp4" in section for section in found)


def test_neither_a_gpu_nor_triton_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    arguments = ["doctor", "--kernels", str(path), "--quantization", "fp8"]
    program = f"import sys; sys.modules['triton'] = None; from tokenmill.cli import main; sys.exit(main({arguments!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "hopper_gemm_fp8" in done.stdout and "fp8_split" in done.stdout


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4", "int8"])
@pytest.mark.parametrize(
    ("name", "columns", "quant"),
    [
        ("layers.0.q.weight", 512, None),
        ("layers.0.q.weight", 384, None),
        ("layers.0.q.weight", 192, None),
        ("head.weight", 512, None),
        ("layers.0.q.weight", 512, "Q4_K"),
        ("layers.0.q.weight", 512, "Q6_K"),
        ("layers.0.down.weight", 192, "Q4_1"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forms_are_those_that_loading_makes(
    name: str, columns: int, quant: str | None, quantization: str, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    from tokenmill.ops.triton.gemm.linear import PackLinear
    from tokenmill.ops.triton.gemm.product import PLAIN
    from tokenmill.weights.dequantize import dequantize

    raw = RawTensor(name, (16, columns), torch.randn(16, columns))
    if quant is not None:
        made = random_raw(quant, columns, 1, 16)
        raw = RawTensor(name, (16, columns), made.data, quant)
    packed = PackLinear(quantization)(
        [raw], None, lambda one: dequantize(one).to(dtype) if len(one.name) else one.data.to(dtype)
    ).packed
    form = PLAIN[packed.dtype] if isinstance(packed, torch.Tensor) else packed.form(dtype)
    stored = {} if quant is None else {name: StoredFormat(quant)}
    assert planned_form(name, (16, columns), PlannedWeights(dtype, quantization, stored)) == form
