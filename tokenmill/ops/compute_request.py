"""The requirements of a model on the kernels that compute it. Names instead of torch's types, so that nothing is
imported."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.arch.spec import Mla, ModelSpec, WindowedMqa

ROUNDED_LATENTS = "a KV cache of one byte a value for latent attention or compressed entries"


@dataclass(frozen=True)
class ComputeRequest:
    """One model on one device. All names are those of the configuration."""

    spec: ModelSpec
    device: str
    dtype: str  # of activations
    kv_dtype: str
    block_size: int = 16
    quantization: str = "none"  # of plain weights, while they are loaded
    deterministic: bool = False  # the same sums for a row whatever the batch

    @property
    def rounds_latents(self) -> bool:
        """True where entries that all heads share would have to be kept in one byte a value, which no backend does."""
        has_latents = any(isinstance(layer.mixer, Mla | WindowedMqa) for layer in self.spec.layers)
        return has_latents and self.kv_dtype in ("int8", "fp8")

    @property
    def chooses_entries(self) -> bool:
        """True where an indexer chooses the tokens that latent attention looks at."""
        return any(isinstance(layer.mixer, Mla) and layer.mixer.is_sparse for layer in self.spec.layers)
