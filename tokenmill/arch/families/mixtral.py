"""Mixtral: Mistral with eight experts per layer, two of them active."""

from __future__ import annotations

from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.family import Family, every_layer
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import MlpSpec, MoeSpec
from tokenmill.arch.tensors import HF_LLAMA, Rule


def _experts(fields: ConfigFields, layer_index: int) -> MoeSpec:
    return MoeSpec(
        num_experts=fields.integer("num_local_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(fields.integer("intermediate_size")),
    )


MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    hf_rules={
        **HF_LLAMA,
        "layers.{i}.router.weight": Rule("model.layers.{i}.block_sparse_moe.gate.weight"),
        "layers.{i}.experts.gate.weight": Rule("model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight"),
        "layers.{i}.experts.up.weight": Rule("model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight"),
        "layers.{i}.experts.down.weight": Rule("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight"),
    },
    gguf=LLAMA.gguf,
    windows=every_layer,
    experts=_experts,
    refused_flags=("attention_bias", "mlp_bias"),
)
