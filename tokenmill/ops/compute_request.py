"""What a model needs from the kernels that compute it. Names instead of torch's types, so that nothing is imported."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.arch.spec import ModelSpec


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
