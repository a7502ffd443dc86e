"""Gemma 3, text part: q and k norms instead of Gemma 2's softcaps; five windowed layers per global one, each type with
its own rope. `gemma3` is the checkpoint with the vision part, which is ignored."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.gemma2 import GEMMA2
from tokenmill.arch.family import TEXT_PREFIXES, VISION_PREFIXES, GGUFTraits
from tokenmill.arch.tensors import GGUF

GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    model_types=("gemma3_text", "gemma3"),
    defaults={
        **GEMMA2.defaults,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    gguf=GGUFTraits("gemma3", GGUF, window_pattern=6, query_scale_from_width_at=62),
    qk_norm="head",
    has_local_rope=True,
    hf_prefixes=TEXT_PREFIXES,
    ignored_prefixes=VISION_PREFIXES,
)
