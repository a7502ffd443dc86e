"""Option names of other engines (vLLM, SGLang, llama.cpp's server and Ollama) and the settings that they stand for.

A name with the same meaning as a setting is accepted (on the command line with a note that names our option). A value
that asks for what is done anyway is dropped. Everything else is refused with what to use instead. Settings that weaken
the server's access control are never translated: they must be written by our name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.errors import InvalidConfig

VLLM, SGLANG, LLAMA_CPP, OLLAMA = "vLLM", "SGLang", "llama.cpp", "Ollama"
ON, OFF = ("true", "1", "on", "yes"), ("false", "0", "off", "no", "none", "")


@dataclass(frozen=True)
class OtherName:
    """An option of another engine."""

    whose: str
    ours: str = ""  # our setting with the same meaning
    values: Mapping[str, str] = field(default_factory=dict)  # the other engine's values → ours, where they differ
    is_switch: bool = False  # takes no value on the command line
    no_effect: tuple[str, ...] = ()  # values that describe what is done anyway
    instead: str = ""  # why other values are refused, and what to use instead


DTYPES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
KV_DTYPES = {"fp8_e4m3": "fp8", "f16": "float16", "f32": "float32", "bf16": "bfloat16", "q8_0": "int8"}
LAYERS = {"0": "cpu", "99": "auto", "999": "auto", "all": "auto"}
ONE_DEVICE = "--replicas starts several engines, --tp splits a model over several ranks"
LEFT_MEMORY = "--memory-fraction is the share of the memory left after loading that the KV cache may take"
ALL_LAYERS = "a model runs on one device as a whole: --device cuda or --device cpu"
TEMPLATE_SAYS = "detected from the chat template; --tool-format overrides it"

OTHER_NAMES: dict[str, OtherName] = {
    # vLLM and SGLang
    "max_model_len": OtherName(VLLM, "max_context"),
    "context_length": OtherName(SGLANG, "max_context"),
    "max_num_seqs": OtherName(VLLM, "max_running"),
    "max_running_requests": OtherName(SGLANG, "max_running"),
    "max_num_batched_tokens": OtherName(VLLM, "token_budget"),
    "chunked_prefill_size": OtherName(SGLANG, "token_budget"),
    "gpu_memory_utilization": OtherName(VLLM, no_effect=("0.9",), instead=LEFT_MEMORY),
    "mem_fraction_static": OtherName(SGLANG, instead=LEFT_MEMORY),
    "served_model_name": OtherName(VLLM, "served_name"),
    "model_path": OtherName(SGLANG, "model"),
    "kv_cache_dtype": OtherName(VLLM, "kv_dtype", KV_DTYPES),
    "enable_prefix_caching": OtherName(VLLM, "prefix_caching", is_switch=True),
    "disable_radix_cache": OtherName(SGLANG, "prefix_caching", {"true": "false"}, is_switch=True),
    "random_seed": OtherName(SGLANG, no_effect=("none",), instead="every request has its own seed"),
    "uvicorn_log_level": OtherName(VLLM, "log_level", {"critical": "error", "trace": "debug"}),
    "allowed_origins": OtherName(VLLM, instead="--cors-origin allows the pages of one origin"),
    "tensor_parallel_size": OtherName(VLLM, "tp", no_effect=("1",)),
    "pipeline_parallel_size": OtherName(VLLM, "pp", no_effect=("1",)),
    "tp_size": OtherName(SGLANG, "tp", no_effect=("1",)),
    "pp_size": OtherName(SGLANG, "pp", no_effect=("1",)),
    "enable_expert_parallel": OtherName(VLLM, "ep", is_switch=True),
    "ep_size": OtherName(SGLANG, no_effect=("1",), instead="--ep distributes whole experts over the ranks of --tp"),
    "enable_dp_attention": OtherName(SGLANG, "dp_attention", is_switch=True),
    "data_parallel_size": OtherName(VLLM, no_effect=("1",), instead=ONE_DEVICE),
    "dp_size": OtherName(SGLANG, no_effect=("1",), instead=ONE_DEVICE),
    "enforce_eager": OtherName(VLLM, is_switch=True, no_effect=OFF, instead="decoding steps are always captured"),
    "trust_remote_code": OtherName(
        VLLM, is_switch=True, no_effect=OFF, instead="code that comes with a model is never run"
    ),
    "enable_chunked_prefill": OtherName(VLLM, is_switch=True, no_effect=ON, instead="prompts always run in chunks"),
    "enable_auto_tool_choice": OtherName(VLLM, is_switch=True, no_effect=ON, instead="tools are always offered"),
    "tool_call_parser": OtherName(VLLM, instead=f"the format of tool calls is {TEMPLATE_SAYS}"),
    "reasoning_parser": OtherName(VLLM, instead=f"the format of reasoning is {TEMPLATE_SAYS}"),
    "speculative_config": OtherName(VLLM, instead="--speculate ngram, or --speculate draft:MODEL"),
    "speculative_model": OtherName(VLLM, instead="--speculate draft:MODEL"),
    "num_speculative_tokens": OtherName(
        VLLM, instead="the length of drafts adapts to the acceptance rate; see --speculate"
    ),
    "swap_space": OtherName(VLLM, no_effect=("0",), instead="preempted requests are recomputed, not swapped"),
    "cpu_offload_gb": OtherName(VLLM, no_effect=("0", "0.0"), instead=ALL_LAYERS),
    "download_dir": OtherName(VLLM, instead="TOKENMILL_HOME is the folder of models"),
    "tokenizer": OtherName(VLLM, no_effect=("none",), instead="a model uses the tokenizer in its own folder"),
    "tokenizer_mode": OtherName(VLLM, no_effect=("auto",), instead="there is only one tokenizer implementation"),
    "revision": OtherName(VLLM, no_effect=("none", "main"), instead="pass the folder of that revision as MODEL"),
    "disable_log_requests": OtherName(VLLM, is_switch=True, no_effect=ON, instead="requests are not logged"),
    "disable_log_stats": OtherName(VLLM, is_switch=True, no_effect=OFF, instead="--log-level warning"),
    "max_logprobs": OtherName(VLLM, instead="a request may ask for up to 20 alternatives, as with OpenAI"),
    "task": OtherName(VLLM, no_effect=("auto", "generate"), instead="generate, chat and embed work with every model"),
    "runner": OtherName(VLLM, no_effect=("auto", "generate"), instead="generate, chat and embed work with every model"),
    "generation_config": OtherName(
        VLLM, no_effect=("auto",), instead="--no-sampling-defaults ignores the model's recommended parameters"
    ),
    "hf_token": OtherName(VLLM, instead="set HF_TOKEN in the environment"),
    "enable_lora": OtherName(
        VLLM,
        is_switch=True,
        no_effect=(*ON, *OFF),
        instead="--adapter-slots sets how many adapters can be used at the same time",
    ),
    "max_loras": OtherName(VLLM, "adapter_slots"),
    "max_loras_per_batch": OtherName(SGLANG, "adapter_slots"),
    "max_lora_rank": OtherName(VLLM, "max_adapter_rank"),
    "lora_modules": OtherName(VLLM, instead="--adapter NAME=PATH, once per adapter"),
    "lora_paths": OtherName(SGLANG, instead="--adapter NAME=PATH, once per adapter"),
    # llama.cpp
    "lora": OtherName(LLAMA_CPP, "adapter"),
    "ctx_size": OtherName(LLAMA_CPP, "max_context"),
    "parallel": OtherName(LLAMA_CPP, "max_running"),
    "batch_size": OtherName(LLAMA_CPP, "token_budget"),
    "ubatch_size": OtherName(LLAMA_CPP, instead="--token-budget is the only limit on a step's tokens"),
    "hf_repo": OtherName(LLAMA_CPP, "model"),
    "n_predict": OtherName(LLAMA_CPP, "max_tokens"),
    "predict": OtherName(LLAMA_CPP, "max_tokens"),
    "temp": OtherName(LLAMA_CPP, "temperature"),
    "repeat_penalty": OtherName(LLAMA_CPP, "repetition_penalty"),
    "gpu_layers": OtherName(LLAMA_CPP, "device", LAYERS),
    "n_gpu_layers": OtherName(LLAMA_CPP, "device", LAYERS),
    "cache_type_k": OtherName(LLAMA_CPP, "kv_dtype", KV_DTYPES),
    "cache_type_v": OtherName(LLAMA_CPP, instead="--kv-dtype is for keys and values"),
    "flash_attn": OtherName(
        LLAMA_CPP,
        is_switch=True,
        no_effect=(*ON, "auto"),
        instead="attention always works in tiles, without a matrix of scores",
    ),
    "cont_batching": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="batching is always continuous"),
    "jinja": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="chat templates are always used"),
    "metrics": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="/metrics is always available"),
    "slots": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="/slots is always available"),
    "embedding": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="embeddings are always available"),
    "embeddings": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="embeddings are always available"),
    "mlock": OtherName(LLAMA_CPP, is_switch=True, no_effect=OFF, instead="let the service manager set LimitMEMLOCK"),
    "mmap": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="files are always memory-mapped"),
    "model_draft": OtherName(LLAMA_CPP, instead="--speculate draft:MODEL"),
    "chat_template_file": OtherName(LLAMA_CPP, "chat_template"),
    # Ollama
    "num_ctx": OtherName(OLLAMA, "max_context"),
    "num_predict": OtherName(OLLAMA, "max_tokens"),
    "num_thread": OtherName(OLLAMA, "threads"),
    "num_gpu": OtherName(OLLAMA, instead=ALL_LAYERS),
    "nowordwrap": OtherName(OLLAMA, is_switch=True, no_effect=ON, instead="answers are printed without wrapping"),
    "keepalive": OtherName(OLLAMA, instead="a model stays in memory while its command runs"),
}
SHORT = {  # llama.cpp's
    "-m": "model", "-hf": "hf_repo", "-c": "ctx_size", "-np": "parallel", "-b": "batch_size", "-ub": "ubatch_size",
    "-t": "threads", "-ngl": "gpu_layers", "-n": "n_predict", "-fa": "flash_attn", "-ctk": "cache_type_k",
    "-ctv": "cache_type_v", "-md": "model_draft", "-cb": "cont_batching",
}  # fmt: skip
OUR_VALUES: dict[str, Mapping[str, str]] = {"dtype": DTYPES}  # of settings with the same name: their value → ours
DETERMINED_BY_FILES = {  # values that a checkpoint implies
    "quantization": (
        *("none", "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "bitsandbytes", "hqq"),
        *("modelopt", "modelopt_fp4", "fbgemm_fp8", "mxfp4", "auto-round"),
    )
}


def by_other_name(name: str, value: Any) -> tuple[str, Any] | None:
    """Return our setting and value for an option of another engine; None if it describes what is done anyway.

    Raise InvalidConfig if it is not supported.
    """
    known = OTHER_NAMES[name]
    written = str(value).lower()
    if written in known.no_effect:
        return None
    if not known.ours:
        raise InvalidConfig(f"{name}={value} ({known.whose}) is not supported", param=name, hint=known.instead or None)
    if known.ours == "device" and written not in known.values:
        raise InvalidConfig(f"{name}={value} ({known.whose}) is not supported", param=name, hint=ALL_LAYERS)
    return known.ours, known.values.get(written, value)


def our_value(name: str, value: Any) -> Any:
    """Translate another engine's value of a setting that has the same name here."""
    if str(value).lower() in DETERMINED_BY_FILES.get(name, ()):
        return "none"
    return OUR_VALUES.get(name, {}).get(str(value).lower(), value)
