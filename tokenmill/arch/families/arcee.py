"""Arcee AFM: Llama with an MLP without a gate, whose activation is the squared ReLU."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.tensors import GGUF_LLAMA

BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_down.bias"}

ARCEE = replace(
    LLAMA,
    name="arcee",
    model_types=("arcee",),
    defaults={
        **LLAMA.defaults,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    gguf=GGUFTraits("arcee", GGUF_LLAMA, config_keys=ConfigKeys(tensors=BIASES)),
    is_gated_mlp=False,
)
