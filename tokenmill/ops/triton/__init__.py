"""Ops for NVIDIA GPUs in Triton, with cuBLAS for large products. Importing this package does not import torch or
Triton.

`build.build_ops` fills the table of ops; `unsupported_reason` returns why a model is not supported.
"""

from __future__ import annotations

from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.spec import WindowedMqa
from tokenmill.arch.unproven import VARIABLE, is_chosen
from tokenmill.ops.compute_request import ROUNDED_LATENTS, ComputeRequest

MAX_HEADS_PER_KV_HEAD = 16
MAX_HEAD_DIM = 512
RECURRENT_DIMS = (16, 32, 64, 128, 256)
MAX_RECURRENT_STATE = 128 * 128
CLAMPED = {"clamped_silu_4", "clamped_silu_5", "clamped_silu_7", "clamped_silu_16"}


def unsupported_reason(request: ComputeRequest) -> str | None:
    """Return why the Triton kernels can't compute a model; None if they can."""
    if request.deterministic and request.quantization != "none":
        return "products with quantised weights are not deterministic: their order of summation depends on the batch"
    for mixer in request.spec.recurrences:
        reason = _recurrent_refusal(mixer)
        if reason is not None:
            return reason
    mixers = (mixer for layer in request.spec.layers for mixer in layer.mixers)
    if all(isinstance(mixer, Recurrent) for mixer in mixers) and not is_chosen("gpu_recurrent_only"):
        return f"a model of recurrent layers alone, not verified on a GPU ({VARIABLE}=gpu_recurrent_only)"
    if request.chooses_entries and request.deterministic:
        return "sparse attention with an indexer is not deterministic: its order of summation depends on the batch"
    if request.rounds_latents:
        return ROUNDED_LATENTS
    for windowed in (layer.mixer for layer in request.spec.layers if isinstance(layer.mixer, WindowedMqa)):
        if windowed.head_dim > MAX_HEAD_DIM or windowed.head_dim % 2:
            return f"heads of {windowed.head_dim} dimensions over compressed entries"
    for attention in request.spec.attentions:
        if attention.num_heads > MAX_HEADS_PER_KV_HEAD * attention.num_kv_heads:
            return f"more than {MAX_HEADS_PER_KV_HEAD} query heads per KV head"
        if attention.head_dim > MAX_HEAD_DIM:
            return f"heads of {attention.head_dim} dimensions"
        if attention.block_indexer is not None:
            return "attention over selected blocks of keys"
        if attention.slopes:
            return "attention with linear biases (ALiBi)"
        if attention.value_dim not in (None, attention.head_dim):
            return "values of another width than keys"
    if request.spec.activations & CLAMPED:
        return "gates that are limited after their activation"
    if request.quantization == "fp8" and not has_fp8(request.device):
        return "fp8 products need an NVIDIA GPU of compute capability 8.9 or higher; int8 and int4 do without"
    return None


def _recurrent_refusal(mixer: Recurrent) -> str | None:
    if mixer.inner is not None:
        return "the recurrence of Mamba-1"
    for what, size in (("keys", mixer.key_dim), ("values", mixer.value_dim)):
        if size not in RECURRENT_DIMS:
            return f"recurrent layers with {what} of {size} dimensions"
    if mixer.key_dim * mixer.value_dim > MAX_RECURRENT_STATE:
        return f"recurrent layers with states of {mixer.key_dim} x {mixer.value_dim}"
    if mixer.strength_scale != 1.0 or mixer.lowest_decay is not None:
        return "recurrent layers with scaled strengths or a lowest decay"
    return None


def has_fp8(device: str) -> bool:
    import torch  # imported only if fp8 is requested

    from tokenmill.ops.triton.launch import capabilities

    return capabilities.has_fp8(torch.device(device))


def keeps_fp4(device: str, dtype: str) -> bool:
    import torch

    from tokenmill.ops.triton.launch import capabilities

    return capabilities.keeps_fp4_on(torch.device(device), getattr(torch, dtype))
