"""Ops for NVIDIA GPUs in Triton, with cuBLAS for large products. Triton itself is imported when a model is built."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from tokenmill.arch.spec import MoeSpec
from tokenmill.ops.interface import Backend, Ops, OpsWanted
from tokenmill.ops.reference.kv_rounding import LARGEST
from tokenmill.ops.triton.launch.capabilities import has_fp8

MAX_HEADS_A_KEY = 16
MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _refuse(wanted: OpsWanted) -> str | None:
    if wanted.device.type != "cuda":
        return f"it computes on a GPU, not on {wanted.device}"
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if wanted.dtype not in DTYPES:
        return f"{wanted.dtype} for activations"
    if wanted.kv_dtype not in (*DTYPES, *LARGEST):
        return f"{wanted.kv_dtype} for the KV cache"
    if wanted.deterministic and wanted.quantization != "none":
        return "products with quantised weights have no one order of adding for every batch (deterministic)"
    for layer in wanted.spec.layers:
        if wanted.deterministic and isinstance(layer.mlp, MoeSpec) and layer.mlp.has_shared_gate:
            return "the gate of experts for all tokens has no one order of adding for every batch (deterministic)"
        if layer.attention.num_heads > MAX_HEADS_A_KEY * layer.attention.num_kv_heads:
            return f"more than {MAX_HEADS_A_KEY} query heads for a key head"
        if layer.attention.head_dim > MAX_HEAD_DIM:
            return f"heads of {layer.attention.head_dim} dimensions"
    if wanted.quantization == "fp8" and not has_fp8(wanted.device):
        return "fp8 products need an NVIDIA GPU of compute capability 8.9 or higher; int8 and int4 do without"
    return None


def _build(wanted: OpsWanted) -> Ops:
    from tokenmill.ops.triton.build import build_ops

    return build_ops(wanted.quantization, deterministic=wanted.deterministic)


TRITON = Backend("triton", _refuse, _build)
