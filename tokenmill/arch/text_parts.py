"""Multimodal models whose text part the engine runs. Given only text, the text part computes what the plain model of
its `text_config` computes: no row is here whose layers also read images, or attend in both directions within a prompt.

Images, audio and video are not implemented; the tensors of those parts are left in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MULTIMODAL: Mapping[str, str] = {
    "audioflamingo3": "qwen2",
    "deepseek_vl": "llama",
    "exaone4_5": "exaone4",
    "glmasr": "llama",
    "got_ocr2": "qwen2",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "lighton_ocr": "qwen3",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "ovis2": "qwen2",
    "qwen2_audio": "qwen2",
    "smolvlm": "llama",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
"""`model_type` of a multimodal config → that of its `text_config`, where the file does not say."""


def text_type(config: Mapping[str, Any]) -> str | None:
    """Return the `model_type` of a multimodal config's text part; None: it is not one of these models."""
    model_type, text = str(config.get("model_type")), config.get("text_config")
    if model_type not in MULTIMODAL or not isinstance(text, Mapping):
        return None
    return str(text.get("model_type") or MULTIMODAL[model_type])


WRAPPED_PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "language_model.model.model.",
)
"""What multimodal checkpoints have before "layers.", most likely first; transformers 5 writes the last for models that
hear."""


def text_tensors(prefix: str) -> tuple[str, ...]:
    """Return the name prefixes of the text part's tensors in a checkpoint with `prefix` before "layers."."""
    return prefix, "lm_head.", "language_model.lm_head."


def with_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of a multimodal config's text part, with those around it where it has none. Whether the head is
    the embedding is a key of the whole model."""
    text = config.get("text_config") or {}
    tied = config.get("tie_word_embeddings")
    return {**config, **text, **({} if tied is None else {"tie_word_embeddings": tied})}
