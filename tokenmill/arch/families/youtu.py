"""Youtu-LLM: DeepSeek V3's latent attention, and an MLP in every layer (in GGUF files, `deepseek2` without experts)."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.deepseek import DEEPSEEK_V3
from tokenmill.arch.family import no_experts

YOUTU = replace(
    DEEPSEEK_V3,
    name="youtu",
    model_types=("youtu",),
    defaults={
        **DEEPSEEK_V3.defaults,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    gguf=None,
    experts=no_experts,
    mtp=None,
)
