"""Availability of the native CPU kernels, and which models they support. No torch.

They are missing if the package was installed without a C++ compiler.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.spec import MixerSpec, Mla, ShortConv
from tokenmill.ops.compute_request import ROUNDED_LATENTS, ComputeRequest

MAX_HEAD_DIM = 512
MAX_CONV_KERNEL = 16


@cache
def _load() -> tuple[ModuleType | None, str]:
    try:
        module = import_module("tokenmill.ops.cpu._native")
    except ImportError as error:
        return None, f"the native kernels were not built ({error}); install a C++ compiler and reinstall tokenmill"
    return module, f"native kernels for {module.instruction_set()}"


def is_available() -> tuple[bool, str]:
    """Return whether the kernels can be used, and a description or the reason why not."""
    module, reason = _load()
    return module is not None, reason


def unsupported_reason(request: ComputeRequest) -> str | None:
    """Return why the native kernels can't compute a model on this machine; None if they can."""
    available, reason = is_available()
    if not available:
        return reason
    if request.block_size % 16:
        return f"KV blocks of {request.block_size} tokens; the native kernels need a multiple of 16"
    sizes = {size for one in request.spec.attentions for size in (one.head_dim, one.value_dim or one.head_dim)}
    if max(sizes, default=0) > MAX_HEAD_DIM:
        return f"heads of {max(sizes)} dimensions; the native kernels take up to {MAX_HEAD_DIM}"
    if request.kv_dtype == "int8" and any(size % 4 for size in sizes):
        return "an int8 KV cache for heads whose dimensions are not a multiple of 4"
    if request.rounds_latents:
        return ROUNDED_LATENTS
    for indexer in filter(None, (attention.block_indexer for attention in request.spec.attentions)):
        if indexer.block_size % request.block_size:
            return f"selected blocks of {indexer.block_size} tokens in KV blocks of {request.block_size}"
    mixers = dict.fromkeys(mixer for layer in request.spec.layers for mixer in layer.mixers)
    return next(filter(None, map(_mixer_reason, mixers)), None)


def _mixer_reason(mixer: MixerSpec) -> str | None:
    """Return which property of a mixer the native kernels don't support."""
    if isinstance(mixer, ShortConv | Recurrent) and mixer.kernel > MAX_CONV_KERNEL:
        return f"convolutions over more than {MAX_CONV_KERNEL} tokens, which the native kernels don't support"
    if isinstance(mixer, Recurrent) and ((mixer.inner is None and mixer.key_dim % 16) or mixer.value_dim % 16):
        return "recurrent heads whose dimensions are not multiples of 16, which the native kernels don't support"
    if isinstance(mixer, Mla) and mixer.gate is not None and mixer.gate.function != "sigmoid":
        return f"a {mixer.gate.function} gate of latent attention, which the native kernels don't support"
    return None


def native() -> ModuleType:
    """Return the compiled module; call `is_available` first."""
    module, reason = _load()
    if module is None:
        raise RuntimeError(reason)
    return module


def load_library(path: str) -> bool:
    """Load a shared library without holding the GIL; returns False if it can't be loaded."""
    module, _ = _load()
    return module is not None and bool(module.load_library(path))


def instruction_set() -> str:
    """Return the kernel variant that this processor runs: amx, avx512, avxvnni, avx2 or portable."""
    return str(native().instruction_set())


def instruction_sets() -> list[str]:
    """Return all kernel variants that this processor can run, best first."""
    return list(native().instruction_sets())
