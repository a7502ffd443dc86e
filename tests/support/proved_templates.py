"""Chat templates that render tool calls, and the format row that reproduces each of them."""

from __future__ import annotations

from pathlib import Path

from tokenmill.text.speech import Speech, detect_speech
from tokenmill.text.template import ChatTemplate
from tokenmill.text.tokenizer import byte_tokenizer

# The row that reproduces the template's calls byte for byte, and the template's thinking format.
PROVED = {
    "Apertus-8B-Instruct": ("apertus", "apertus"),
    "Apriel-1.6-15b-Thinker-fixed": ("json-list", "apriel"),
    "Bielik-11B-v3.0-Instruct": ("hermes", "think"),
    "ByteDance-Seed-OSS": ("seed-oss", "seed"),
    "Cohere2MoE": ("cohere", "cohere"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command-r-plus", None),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere", "cohere"),
    "GLM-4.6": ("glm-4.5", "think"),
    "GLM-4.7-Flash": ("glm-4.7", "think"),
    "GigaChat3-10B-A1.8B": ("gigachat-3", None),
    "GigaChat3.1-10B-A1.8B": ("gigachat-3.1", None),
    "Kimi-K2-Instruct": ("kimi-k2", None),
    "Kimi-K2-Thinking": ("kimi-k2", "think"),
    "Kimi-K3": ("kimi-k3", "kimi-k3"),
    "LFM2.5-8B-A1B": ("pythonic", "think"),
    "MiMo-VL": ("hermes", None),
    "MiniMax-M1": ("minimax-m1", None),
    "MiniMax-M2": ("minimax-m2", "think"),
    "MiniMax-M3": ("minimax-m3", "minimax-m3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral-id", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3-coder", "think"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "think"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3-coder", None),
    "Qwen3.5-4B": ("qwen3-coder", "think"),
    "Reka-Edge": ("hermes-tight", "think"),
    "StepFun3.5-Flash": ("qwen3-coder-tight", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek-r1", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek-r1", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek-v3.1", "think"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek-v3.2", "think"),
    "deepseek-ai-DeepSeek-V4": ("deepseek-v4", "think"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek-v4", "think"),
    "fireworks-ai-llama-3-firefunction-v2": ("functools", None),
    "google-gemma-4-31B-it": ("gemma-4", "gemma-4"),
    "google-gemma-4-31B-it-interleaved": ("gemma-4", "gemma-4"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "ibm-granite-granite-4.1": ("hermes", None),
    "meetkai-functionary-medium-v3.1": ("functionary-3.1", None),
    "meetkai-functionary-medium-v3.2": ("functionary-3.2", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3", None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral-nemo", None),
    "moonshotai-Kimi-K2": ("kimi-k2", None),
    "muse-glimmer": ("muse", "muse"),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "openbmb-MiniCPM5-1B": ("minicpm-5", "think"),
    "poolside-Laguna-S-2.1": ("glm-4.7", "think"),
    "poolside-Laguna-XS-2.1": ("glm-4.5", "think"),
    "poolside-Laguna-XS.2": ("glm-4.5", "think"),
    "tencent-Hy3": ("hunyuan-3", "hunyuan-3"),
    "unsloth-Apriel-1.5": ("json-list", "thinking"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
    "upstage-Solar-Open-100B": ("solar", "solar"),
}


def template_and_speech(shared_dir: Path, name: str) -> tuple[ChatTemplate, Speech]:
    source = (shared_dir / "templates" / f"{name}.jinja").read_text()
    template = ChatTemplate(source, {"bos_token": "<BOS>", "eos_token": "<EOS>"})
    return template, detect_speech(template, byte_tokenizer())
