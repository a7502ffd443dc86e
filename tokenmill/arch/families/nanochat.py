"""nanochat: RMS norms without weights, also of the embeddings and of rotated queries and keys, an MLP of squared ReLUs
without a gate, soft-capped logits."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.family import Family
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import ModelSpec, NormSpec
from tokenmill.arch.tensors import HF_LLAMA, Rule, swapped_halves


def _adjust_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    return replace(model, has_embed_norm=True)


NANOCHAT = Family(
    name="nanochat",
    model_types=("nanochat",),
    defaults={
        "hidden_act": "relu2",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "final_logit_softcapping": 15.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    hf_rules=swapped_halves(
        {
            **HF_LLAMA,
            "layers.{i}.up.weight": Rule("model.layers.{i}.mlp.fc1.weight"),
            "layers.{i}.down.weight": Rule("model.layers.{i}.mlp.fc2.weight"),
        }
    ),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    is_gated_mlp=False,
    qk_norm="l2_after_rope",
    norm=NormSpec(has_weight=False),
    has_softcaps=True,
    adjust_model=_adjust_model,
)
