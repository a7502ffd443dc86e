"""Types of settings that `LLM` and `AsyncEngine.start` take as keywords, for editors and type checkers.

Made by `python tools/write_docs.py` from the dataclasses in `config/engine.py`, which explain each; a test compares.
Names of other engines that mean the same (`config/other_names.py`) come last.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict


class EngineSettings(TypedDict, total=False):
    activation_bits: Literal["auto", "8", "mixed", "16"]
    adapter: tuple[str, ...]
    adapter_slots: int | None
    backend: Literal["auto", "reference", "cpu", "triton"]
    block_size: int | None
    chat_template: str | None
    context_keep: int
    context_shift: bool
    deterministic: bool
    device: Literal["auto", "cpu", "cuda"]
    dp_attention: bool
    dtype: Literal["auto", "float32", "bfloat16", "float16", "half", "float", "fp16", "bf16", "fp32"]
    ep: bool
    expert_copies: int
    expert_loads: str | None
    fast_start: bool | None
    kv_disk: str | None
    kv_disk_gb: float | None
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]
    kv_host_gb: float
    kv_transfer: Literal["stream", "nixl"]
    lanes: int | None
    link: Literal["auto", "threads", "shared", "gloo", "ipc"]
    literal_content: bool
    load_format: Literal["auto", "safetensors", "gguf", "dummy"]
    max_adapter_rank: int | None
    max_context: int | None
    max_running: int | None
    max_waiting: int
    memory_fraction: float | None
    num_blocks: int | None
    num_states: int | None
    packed_cache: bool
    pp: int
    prefix_caching: bool
    quantization: str | None
    rank_gpus: str | None
    sampling_defaults: bool
    seed: int
    served_name: str | None
    slo: str | None
    speculate: str
    stages_at: str | None
    step_ms: float | None
    threads: int | None
    token_budget: int | None
    tool_format: str
    tp: int
    adapters: Mapping[str, str | Path]
    cpu_offload_gb: Any
    data_parallel_size: Any
    disable_log_requests: Any
    disable_log_stats: Any
    enable_auto_tool_choice: Any
    enable_chunked_prefill: Any
    enable_expert_parallel: Any
    enable_lora: Any
    enable_prefix_caching: Any
    enforce_eager: Any
    generation_config: Any
    gpu_memory_utilization: Any
    kv_cache_dtype: Any
    max_lora_rank: Any
    max_loras: Any
    max_model_len: Any
    max_num_batched_tokens: Any
    max_num_seqs: Any
    pipeline_parallel_size: Any
    revision: Any
    runner: Any
    served_model_name: Any
    swap_space: Any
    task: Any
    tensor_parallel_size: Any
    tokenizer: Any
    tokenizer_mode: Any
    trust_remote_code: Any
