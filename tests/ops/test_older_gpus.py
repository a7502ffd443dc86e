"""GPUs that are not at hand: every kernel that steps of large models launch is compiled for them and fits the memory of
their multiprocessors, at the latest with one tile on its way at a time. Compilers need no device for that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources

from tests.support.compiled_launches import KernelLaunch
from tests.support.compute_requests import WANTED
from tests.support.warm_up import LLAMA, MAX_CONTEXT, QWEN, compile_at_once, warm_up_for
from tokenmill.engine.backends import TRITON
from tokenmill.ops.triton.gemm import splitk
from tokenmill.ops.triton.launch import capabilities
from tokenmill.ops.triton.launch.kernel import Kernel
from tokenmill.ops.triton.launch.pdl import launch_options, overlaps
from tokenmill.ops.triton.moe import gemv as moe_gemv_int
from tokenmill.ops.triton.moe import grouped_gemm as moe_grouped_gemm_int
from tokenmill.ops.triton.quant import gemv_int4, packed_int
from tokenmill.runner.memory import graph_sizes

KIB = 1024
# A program's at most; 8.6 has what 8.9 has.
SHARED = {80: 163 * KIB, 89: 99 * KIB, 120: 99 * KIB, "gfx942": 64 * KIB}
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584,
    "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256, "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 1024,
    "intermediate_size": 4608, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "norm_eps": 1e-5, "rope_theta": 1e6, "conv_L_cache": 3,
    "conv_bias": False, "layer_types": ["conv", "full_attention"], "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 1024, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": True, "attention_bias": False, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25},
}  # fmt: skip
KIMI = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 1024, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
    "model_max_length": 8192, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "qk_rope_head_dim": 64, "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1, "hidden_act": "silu",
    "moe_intermediate_size": 256, "moe_renormalize": True, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
    "linear_attn_config": {"full_attn_layers": [2], "head_dim": 128, "num_heads": 8, "short_conv_kernel_size": 4},
}  # fmt: skip
GEMMA3N = {
    "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "vocab_size": 1024, "num_hidden_layers": 4,
    "vocab_size_per_layer_input": 1024, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": [16384] * 4,
}  # fmt: skip
MIXERS = ("_prepare_tokens", "_recur_tokens", "_convolve_segments", "_scan", "_gate_and_norm")
STREAMED = ("_predict_streams", "_correct_streams", "_as_long", "_cut_act_mul")


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers keep what they made, for GPUs that never come."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def target_of(name: int | str) -> GPUTarget:
    return GPUTarget("cuda", name, 32) if isinstance(name, int) else GPUTarget("hip", name, 64)


def launches(name: int | str, config: dict[str, Any], **how: Any) -> Iterator[KernelLaunch]:
    """Return the kernel launches of a start and of decode steps of every size, on a GPU with these capabilities."""
    found: dict[Any, KernelLaunch] = {}

    def launch(self: Kernel, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        one = KernelLaunch(self._jitted, args, options)
        found.setdefault(one.form, one)

    launch_options.cache_clear()
    with (
        patch.object(Kernel, "_launch", launch),
        patch.object(torch.Tensor, "pin_memory", lambda self: self),
        patch("tokenmill.runner.warmup.compile_in_parallel", compile_at_once),
        patch("tokenmill.ops.triton.launch.pdl.overlaps", lambda: isinstance(name, int) and name >= 90),
        patch("tokenmill.ops.triton.attention.kv_cache.has_fp8", lambda device: isinstance(name, int) and name >= 89),
        patch.object(splitk, "has_ptx", lambda: isinstance(name, int)),
        patch.object(gemv_int4, "has_ptx", lambda: isinstance(name, int)),
        patch.object(moe_gemv_int, "has_ptx", lambda: isinstance(name, int)),
        patch.object(moe_grouped_gemm_int, "has_ptx", lambda: isinstance(name, int)),
    ):
        warm_up = warm_up_for(config, **how)
        warm_up.compile_first(8192, list)
        warm_up.compile_rest()
        warm_up.rehearse([(700, 1), (5, MAX_CONTEXT // 2)])
        for size in graph_sizes(256):
            warm_up.compute(warm_up.decoding(size))
    launch_options.cache_clear()
    yield from found.values()


def require_fits(one: KernelLaunch, name: int | str) -> None:
    """As a launch does: with fewer tiles on their way where there is no room for all."""
    target = target_of(name)
    stages = one.options.get("num_stages", 3)
    taken = one.shared_bytes(target)
    while taken > SHARED[name] and stages > 1:
        stages -= 1
        taken = one.shared_bytes(target, stages)
    assert taken <= SHARED[name], (one.form, taken)


def test_a_cache_of_fp8_is_read_where_there_is_no_such_number() -> None:
    """Ampere; what decodes one row, the dearest of them to be wrong about"""
    forms = launches(80, LLAMA, kv_dtype=torch.float8_e4m3fn)
    found = {one.jitted.fn.__name__: one for one in forms}
    for kernel in ("_norm_rope_write_kv", "_fused_decode_attention"):
        require_fits(found[kernel], 80)


def test_short_convolutions_are_compiled() -> None:
    """The interpreter takes constants for numbers, so it does not show all that a compiler refuses."""
    found = {one.jitted.fn.__name__: one for one in launches(80, LFM2)}
    require_fits(found["_short_conv"], 80)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(
    ("config", "kernels"),
    [(QWEN3_5, (*MIXERS, "solve")), (KIMI, (*MIXERS, "solve_channels")), (GEMMA3N, STREAMED)],
)
def test_newer_layers_are_compiled(name: int | str, config: dict[str, Any], kernels: tuple[str, ...]) -> None:
    found = {one.jitted.fn.__name__: one for one in launches(name, config)}
    for kernel in kernels:
        require_fits(found[kernel], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(
    ("config", "how"),
    [
        (LLAMA, {"kv_dtype": torch.float8_e4m3fn}),
        (QWEN, {"deterministic": True}),
        (GEMMA, {"dtype": torch.float32}),
        (GEMMA, {"deterministic": True, "kv_dtype": torch.int8}),
        (GEMMA | {"head_dim": 512, "num_key_value_heads": 2}, {}),
        (GEMMA | {"head_dim": 512}, {"deterministic": True}),
    ],
)
def test_kernels_fit_other_gpus(name: int | str, config: dict[str, Any], how: dict[str, Any]) -> None:
    num_seen = 0
    for one in launches(name, config, **how):
        require_fits(one, name)
        num_seen += 1
    assert num_seen > 15


class Jitted:
    """A kernel that takes 40 KiB a stage."""

    params = ()

    def __init__(self, shared_bytes: int) -> None:
        self.tried: list[int] = []
        self._shared_bytes = shared_bytes

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, num_stages: int = 3, enable_fp_fusion: bool) -> str:
            self.tried.append(num_stages)
            if num_stages * 40 * KIB > self._shared_bytes:
                raise OutOfResources(num_stages * 40 * KIB, self._shared_bytes, "shared memory")
            return "ran"

        return run


def kernel_of(jitted: Jitted) -> Kernel:
    made = Kernel(lambda: None)
    made.__dict__["_jitted"] = jitted  # in place of what Triton would make of the function
    return made


def test_a_launch_makes_do_with_the_memory_there_is() -> None:
    ada = Jitted(99 * KIB)
    assert kernel_of(ada)._run_first((1,), (), {"num_stages": 4}) == "ran" and ada.tried == [4, 3, 2]
    unsaid = Jitted(99 * KIB)
    assert kernel_of(unsaid)._run_first((1,), (), {}) == "ran" and unsaid.tried == [3, 2]
    with pytest.raises(OutOfResources):
        kernel_of(Jitted(39 * KIB))._run_first((1,), (), {"num_stages": 2})


@pytest.mark.parametrize(
    ("hip", "capability", "has"), [(None, (8, 6), False), (None, (8, 9), True), ("6", (9, 4), False)]
)
def test_who_computes_with_fp8(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, capability: tuple[int, int], has: bool
) -> None:
    """An MI300 calls itself 9.4, which is not Hopper: nothing that only NVIDIA has is asked of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "some GPU")
    capabilities.has_fp8.cache_clear()
    try:
        refusal = TRITON.unsupported_reason(replace(WANTED, quantization="fp8"))
        assert refusal is None if has else "compute capability 8.9" in str(refusal)
        assert TRITON.unsupported_reason(replace(WANTED, kv_dtype="fp8")) is None
        assert packed_int.has_ptx() == (hip is None)
        assert not overlaps.__wrapped__() and not capabilities.probe_capabilities(torch.device("cuda")).is_hopper
    finally:
        capabilities.has_fp8.cache_clear()
