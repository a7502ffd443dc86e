"""StarCoder 2: LayerNorm and biases everywhere, an MLP without a gate."""

from __future__ import annotations

from tokenmill.arch.family import Family, GGUFTraits, every_layer
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import NormSpec
from tokenmill.arch.tensors import GGUF, HF_LLAMA, HF_UNGATED_MLP, with_norm_biases

STARCODER2 = Family(
    name="starcoder2",
    model_types=("starcoder2",),
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_bias": True,
        "sliding_window": None,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    hf_rules={**with_norm_biases(HF_LLAMA), **HF_UNGATED_MLP},
    gguf=GGUFTraits(
        "starcoder2",
        with_norm_biases(GGUF),
        config_keys=ConfigKeys({"norm_epsilon": "attention.layer_norm_epsilon"}, {"use_bias": "blk.0.attn_q.bias"}),
    ),
    qkv_bias="use_bias",
    out_bias="use_bias",
    mlp_bias="use_bias",
    is_gated_mlp=False,
    norm=NormSpec("layer", has_bias=True),
    norm_eps_key="norm_epsilon",
    windows=every_layer,
)
