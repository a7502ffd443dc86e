"""Settings by the names that other engines have for them: vLLM, SGLang, llama.cpp's server and Ollama.

A name that means the same is taken (on the command line with a note that says what it is called here); a value that
asks for what is done anyway is dropped; everything else is refused with what to use instead. No setting that opens the
server to others has a name here: it must be written by our own name.
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
    """One setting of another engine."""

    whose: str
    ours: str = ""  # the field here that means the same
    values: Mapping[str, str] = field(default_factory=dict)  # those that are written differently here
    is_switch: bool = False  # on the command line no value follows it
    no_effect: tuple[str, ...] = ()  # values that ask for what is done anyway
    instead: str = ""  # why other values are refused, and what to do here


DTYPES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
KV_DTYPES = {"fp8_e4m3": "fp8", "f16": "float16", "f32": "float32", "bf16": "bfloat16", "q8_0": "int8"}
LAYERS = {"0": "cpu", "99": "auto", "999": "auto", "all": "auto"}
ONE_DEVICE = "--tp divides a model among several ranks"
LEFT_MEMORY = "--memory-fraction is the share that the KV cache may take of what is left after loading"
ALL_LAYERS = "a model runs on one device as a whole: --device cuda or --device cpu"
TEMPLATE_SAYS = "found out from the chat template; --tool-format overrides it"

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
    "random_seed": OtherName(SGLANG, no_effect=("none",), instead="requests have a seed each"),
    "uvicorn_log_level": OtherName(VLLM, "log_level", {"critical": "error", "trace": "debug"}),
    "allowed_origins": OtherName(VLLM, instead="--cors-origin lets the pages of one origin in"),
    "tensor_parallel_size": OtherName(VLLM, "tp", no_effect=("1",)),
    "pipeline_parallel_size": OtherName(VLLM, "pp", no_effect=("1",)),
    "tp_size": OtherName(SGLANG, "tp", no_effect=("1",)),
    "pp_size": OtherName(SGLANG, "pp", no_effect=("1",)),
    "data_parallel_size": OtherName(VLLM, no_effect=("1",), instead=ONE_DEVICE),
    "dp_size": OtherName(SGLANG, no_effect=("1",), instead=ONE_DEVICE),
    "enforce_eager": OtherName(VLLM, is_switch=True, no_effect=OFF, instead="decoding steps are always captured"),
    "trust_remote_code": OtherName(
        VLLM, is_switch=True, no_effect=OFF, instead="code that comes with a model is never run"
    ),
    "enable_chunked_prefill": OtherName(VLLM, is_switch=True, no_effect=ON, instead="prompts always run in chunks"),
    "enable_auto_tool_choice": OtherName(VLLM, is_switch=True, no_effect=ON, instead="tools are always offered"),
    "tool_call_parser": OtherName(VLLM, instead=f"how a model writes tool calls is {TEMPLATE_SAYS}"),
    "reasoning_parser": OtherName(VLLM, instead=f"how a model writes thoughts is {TEMPLATE_SAYS}"),
    "speculative_config": OtherName(VLLM, instead="--speculate ngram, or --speculate draft:MODEL"),
    "speculative_model": OtherName(VLLM, instead="--speculate draft:MODEL"),
    "num_speculative_tokens": OtherName(VLLM, instead="drafts are as long as they pay; see --speculate"),
    "swap_space": OtherName(VLLM, no_effect=("0",), instead="preempted requests are computed again, not swapped"),
    "cpu_offload_gb": OtherName(VLLM, no_effect=("0", "0.0"), instead=ALL_LAYERS),
    "download_dir": OtherName(VLLM, instead="TOKENMILL_HOME is where models are kept"),
    "tokenizer": OtherName(VLLM, no_effect=("none",), instead="a model is read with the tokenizer in its own folder"),
    "tokenizer_mode": OtherName(VLLM, no_effect=("auto",), instead="there is one kind of tokenizers"),
    "revision": OtherName(VLLM, no_effect=("none", "main"), instead="give the folder of that revision as MODEL"),
    "disable_log_requests": OtherName(VLLM, is_switch=True, no_effect=ON, instead="requests are not logged"),
    "disable_log_stats": OtherName(VLLM, is_switch=True, no_effect=OFF, instead="--log-level warning"),
    "max_logprobs": OtherName(VLLM, instead="a request may ask for 20 alternatives, as with OpenAI"),
    "task": OtherName(VLLM, no_effect=("auto", "generate"), instead="generate, chat and embed work with every model"),
    "runner": OtherName(VLLM, no_effect=("auto", "generate"), instead="generate, chat and embed work with every model"),
    "generation_config": OtherName(
        VLLM, no_effect=("auto",), instead="--no-sampling-defaults leaves the model's own settings out"
    ),
    "hf_token": OtherName(VLLM, instead="set HF_TOKEN in the environment"),
    "enable_lora": OtherName(
        VLLM,
        is_switch=True,
        no_effect=(*ON, *OFF),
        instead="--adapter-slots says how many adapters can be used at a time",
    ),
    "max_loras": OtherName(VLLM, "adapter_slots"),
    "max_loras_per_batch": OtherName(SGLANG, "adapter_slots"),
    "max_lora_rank": OtherName(VLLM, "max_adapter_rank"),
    "lora_modules": OtherName(VLLM, instead="--adapter NAME=PATH, once for each"),
    "lora_paths": OtherName(SGLANG, instead="--adapter NAME=PATH, once for each"),
    # llama.cpp
    "lora": OtherName(LLAMA_CPP, "adapter"),
    "ctx_size": OtherName(LLAMA_CPP, "max_context"),
    "parallel": OtherName(LLAMA_CPP, "max_running"),
    "batch_size": OtherName(LLAMA_CPP, "token_budget"),
    "ubatch_size": OtherName(LLAMA_CPP, instead="--token-budget is the one size of a step"),
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
        LLAMA_CPP, is_switch=True, no_effect=(*ON, "auto"), instead="attention never keeps all scores"
    ),
    "cont_batching": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="requests always share steps"),
    "jinja": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="chat templates are always used"),
    "metrics": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="/metrics is always there"),
    "slots": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="/slots is always there"),
    "embedding": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="embeddings are always there"),
    "embeddings": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="embeddings are always there"),
    "mlock": OtherName(LLAMA_CPP, is_switch=True, no_effect=OFF, instead="let the service manager set LimitMEMLOCK"),
    "mmap": OtherName(LLAMA_CPP, is_switch=True, no_effect=ON, instead="files are always mapped"),
    "model_draft": OtherName(LLAMA_CPP, instead="--speculate draft:MODEL"),
    "chat_template_file": OtherName(LLAMA_CPP, "chat_template"),
    # Ollama
    "num_ctx": OtherName(OLLAMA, "max_context"),
    "num_predict": OtherName(OLLAMA, "max_tokens"),
    "num_thread": OtherName(OLLAMA, "threads"),
    "num_gpu": OtherName(OLLAMA, instead=ALL_LAYERS),
    "nowordwrap": OtherName(OLLAMA, is_switch=True, no_effect=ON, instead="answers are written as they come"),
    "keepalive": OtherName(OLLAMA, instead="a model stays for as long as its command runs"),
}
SHORT = {  # llama.cpp's
    "-m": "model", "-hf": "hf_repo", "-c": "ctx_size", "-np": "parallel", "-b": "batch_size", "-ub": "ubatch_size",
    "-t": "threads", "-ngl": "gpu_layers", "-n": "n_predict", "-fa": "flash_attn", "-ctk": "cache_type_k",
    "-ctv": "cache_type_v", "-md": "model_draft", "-cb": "cont_batching",
}  # fmt: skip
OUR_VALUES: dict[str, Mapping[str, str]] = {"dtype": DTYPES}  # values of settings that have the same name
LEFT_TO_THE_FILES = {
    "quantization": (
        *("none", "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "bitsandbytes", "hqq"),
        *("modelopt", "modelopt_fp4", "fbgemm_fp8", "mxfp4", "auto-round"),
    )
}


def by_other_name(name: str, value: Any) -> tuple[str, Any] | None:
    """The setting here that `name` stands for, with its value; None: what it asks for is done anyway.

    Raises InvalidConfig where it means something that is not to be had.
    """
    known = OTHER_NAMES[name]
    written = str(value).lower()
    if written in known.no_effect:
        return None
    if not known.ours:
        raise InvalidConfig(
            f"{name}={value} ({known.whose}) is not to be had here", param=name, hint=known.instead or None
        )
    if known.ours == "device" and written not in known.values:
        raise InvalidConfig(f"{name}={value} ({known.whose}) is not to be had here", param=name, hint=ALL_LAYERS)
    return known.ours, known.values.get(written, value)


def our_value(name: str, value: Any) -> Any:
    """The value of one of our own settings, where another engine writes the same differently."""
    if str(value).lower() in LEFT_TO_THE_FILES.get(name, ()):
        return "none"
    return OUR_VALUES.get(name, {}).get(str(value).lower(), value)
