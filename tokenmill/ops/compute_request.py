"""What a model requires of the kernels that compute it. Types are given as names, so that torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.arch.spec import Mla, ModelSpec, WindowedMqa

ROUNDED_LATENTS = "a one-byte KV cache for latent attention, compressed entries or an indexer of blocks"
ONE_BYTE_DTYPES = ("int8", "fp8")


def caches_latents(spec: ModelSpec) -> bool:
    """Return whether a model caches latents, compressed entries or the keys of an indexer, which no backend stores in
    one byte a value."""
    has_latents = any(isinstance(layer.mixer, Mla | WindowedMqa) for layer in spec.layers)
    return has_latents or any(attention.block_indexer is not None for attention in spec.attentions)


@dataclass(frozen=True)
class ComputeRequest:
    """One model on one device, in the names of the configuration."""

    spec: ModelSpec
    device: str
    dtype: str  # of activations
    kv_dtype: str
    block_size: int = 16
    quantization: str = "none"  # of unquantised weights, at load
    deterministic: bool = False  # a row's sums do not depend on the batch

    @property
    def rounds_latents(self) -> bool:
        """True if a one-byte cache was requested for what no backend stores in one byte a value."""
        return self.kv_dtype in ONE_BYTE_DTYPES and caches_latents(self.spec)

    @property
    def chooses_entries(self) -> bool:
        """True if latent attention is sparse: an indexer chooses the entries that it reads."""
        return any(isinstance(layer.mixer, Mla) and layer.mixer.is_sparse for layer in self.spec.layers)
