"""Warm-up of large models on meta tensors: which kernels are compiled depends only on shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.tensors import TensorSpec, tensors_of
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import DTYPES, KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import AdapterSlots, Loader
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.triton.build import build_ops
from tokenmill.runner.decode_graphs import DecodeGraphs
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.runner.warmup import WarmUp

META = torch.device("meta")
MAX_ROWS, MAX_CONTEXT, BUDGET = 256, 4096, 8192
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "rope_local_base_freq": 1e4, "sliding_window": 512, "sliding_window_pattern": 4, "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048,
    "intermediate_size": 12288, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 32768, "full_attn_idxs": [2, 5],
}  # fmt: skip


class Shapes:
    """Weights of a model, as shapes without values. They are plain, or, for stacked matrices, blocks of two formats:
    some layers use the second one for some matrices, as in llama.cpp's files."""

    def __init__(self, tensors: dict[str, TensorSpec], blocks: tuple[str, str] | None = None) -> None:
        self._tensors = tensors
        self._blocks = blocks

    def get(self, name: str) -> RawTensor:
        tensor = self._tensors[name]
        if self._blocks is not None and tensor.kind != "vector" and "router" not in name:
            quant = self._blocks[(".v." in name or "down" in name) and int(name.split(".")[1]) % 4 == 0]
            row_bytes = GGML_TYPE_BY_NAME[quant].row_bytes(tensor.shape[-1])
            blocks = torch.empty(*tensor.shape[:-1], row_bytes, dtype=torch.uint8, device=META)
            return RawTensor(name, tensor.shape, blocks, quant)
        dtype = torch.float32 if tensor.kind == "vector" else torch.bfloat16
        return RawTensor(name, tensor.shape, torch.empty(tensor.shape, dtype=dtype, device=META))


class FinishedCompilation:
    """Compile workers that call each request for kernels when it is made."""

    is_working = True

    def __init__(self) -> None:
        self._noted: list[Callable[[], object]] = []

    def join(self) -> None:
        pass

    def note(self, request: Callable[[], object]) -> None:
        self._noted.append(request)

    def make(self, *requests: Callable[[], object]) -> None:
        for request in (*self._noted, *requests):
            request()


def compile_at_once(*requests: Callable[[], object]) -> FinishedCompilation:
    for request in requests:
        request()
    return FinishedCompilation()


def warm_up_for(
    config: dict[str, Any],
    quantization: str = "none",
    *,
    deterministic: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    blocks: tuple[str, str] | None = None,
    block_size: int = 16,
    slots: AdapterSlots | None = None,
) -> WarmUp:
    spec = spec_from_hf(config)
    source: Any = Shapes(tensors_of(spec), blocks)
    ops = build_ops(quantization, deterministic=deterministic)
    model = Decoder(spec, Loader(source, ops, dtype, META, slots or AdapterSlots(0)), MAX_CONTEXT)
    names = {kept: name for name, kept in DTYPES.items()}
    layout = KVLayout.from_spec(spec, CacheDtypes(names[kv_dtype or dtype], names[dtype]))
    storage = KVStorage(layout, 2, block_size, META)
    with patch("torch.cuda.graph_pool_handle"):
        graphs = DecodeGraphs(model, storage, DeviceSampler(spec.vocab_size, 4, META), 4, 13, MAX_CONTEXT)
    return WarmUp(model, storage, graphs, MAX_ROWS, MAX_CONTEXT)
