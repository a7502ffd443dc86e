"""What must be known of the machine and the model's files before `auto` settings are settled (`resolve.py`)."""

from __future__ import annotations

from pathlib import Path

import torch

from tokenmill.arch.cost import num_parameters
from tokenmill.arch.packed_formats import stored_formats
from tokenmill.arch.spec import ModelSpec
from tokenmill.arch.traffic import weight_parts
from tokenmill.config import EngineConfig
from tokenmill.engine.model import KV_DTYPES
from tokenmill.engine.resolve import DTYPE_BYTES, MachineFacts, compute_dtype
from tokenmill.hardware.gpu import Gpu
from tokenmill.hardware.machine import probe_machine
from tokenmill.ops.cpu import is_available
from tokenmill.ops.cpu.decoder import refusal
from tokenmill.runner.memory import NOTHING_STORED, Formats, gpu_weight_bytes
from tokenmill.weights.locate import stored_bytes


def machine_facts(config: EngineConfig, spec: ModelSpec, path: Path) -> MachineFacts:
    machine = probe_machine()
    has_cuda = config.ops.device != "cpu" and torch.cuda.is_available()
    native_reason = native_unsupported_reason(config, spec)
    is_native = not has_cuda and native_reason is None and config.ops.backend in ("auto", "cpu")
    stored = kept_formats(config, spec, path) if has_cuda else NOTHING_STORED
    return MachineFacts(
        cores=machine.cpu.usable_cores,
        available_bytes=torch.cuda.mem_get_info()[0] if has_cuda else machine.memory.available_bytes,
        weight_bytes=expected_weight_bytes(config, spec, path, stored, has_cuda=has_cuda, is_native=is_native),
        has_cuda=has_cuda,
        native_reason=native_reason,
        has_words=has_cuda and (bool(stored) or config.model.quantization in ("int4", "int8")),
        unused_gpu=next(filter(None, map(unused_gpu, machine.gpus)), None),
    )


def unused_gpu(gpu: Gpu) -> str | None:
    """Why torch does not compute on a GPU that is there; None: it can"""
    platform, built = ("ROCm", torch.version.hip) if gpu.vendor == "amd" else ("CUDA", torch.version.cuda)
    if built is None:
        how = "https://pytorch.org/get-started/locally names one that is not"
        return f"there is {gpu.name}, but this torch is built without {platform}: {how}"
    if not torch.cuda.is_available():
        return f"there is {gpu.name}, but torch can't open it: its driver may be too old for {platform} {built}"
    return None


def native_unsupported_reason(config: EngineConfig, spec: ModelSpec) -> str | None:
    """Why the native kernels can't compute this model here; None when they can."""
    available, reason = is_available()
    if not available:
        return reason
    if config.model.dtype not in ("auto", "float32"):
        return f"the native kernels compute in float32, not {config.model.dtype}"
    kv_dtype = "float16" if config.cache.kv_dtype == "auto" else config.cache.kv_dtype
    return refusal(spec, config.cache.block_size, KV_DTYPES[kv_dtype])


def kept_formats(config: EngineConfig, spec: ModelSpec, path: Path) -> Formats:
    """What of a file a GPU computes with as it is: nothing in plain float32, nor where sums have one order only."""
    ops, model = config.ops, config.model
    is_expanded = ops.deterministic or ops.backend == "reference" or model.load_format == "dummy"
    is_plain = model.quantization == "none" and compute_dtype(model, ops, spec, on_gpu=True) == "float32"
    if is_expanded or is_plain:
        return NOTHING_STORED
    return stored_formats(path, spec)


def expected_weight_bytes(
    config: EngineConfig, spec: ModelSpec, path: Path, stored: Formats, *, has_cuda: bool, is_native: bool
) -> int:
    """Native kernels keep a file's precision, or round to blocks of 8 bits, Triton's have words of 4 and 8 bits; the
    reference expands everything to the compute dtype."""
    if is_native:
        in_file = num_parameters(spec) * 4 if config.model.load_format == "dummy" else stored_bytes(path)
        rounded = weight_parts(spec, "Q8_0", vector_dtype="float32").total
        return min(in_file, rounded) if config.model.quantization == "int8" else in_file
    value_bytes = DTYPE_BYTES[compute_dtype(config.model, config.ops, spec, on_gpu=has_cuda)]
    if has_cuda:
        return gpu_weight_bytes(spec, value_bytes, config.model.quantization, stored)
    return num_parameters(spec) * value_bytes
