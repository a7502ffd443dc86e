"""Random (dummy) weights for a spec, for benchmarks and tests without a checkpoint.

Each tensor depends only on the seed and its own name, so the order of access does not matter. Norms are ones; all other
weights have a standard deviation of 0.02, so that activations stay finite through any number of layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

import torch

from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME
from tokenmill.arch.packed_formats import StoredFormat
from tokenmill.arch.spec import ModelSpec, TensorSpec
from tokenmill.arch.tensors import tensors_of
from tokenmill.errors import UnsupportedModel
from tokenmill.ops.raw import RawTensor

DEVIATION = 0.02
# Per format: offsets of a block's half-precision scales, and the values that give weights about that deviation. All
# other bytes are random: any bits are valid weights and scales.
_BLOCK_SCALES: dict[str, dict[int, float]] = {
    "Q8_0": {0: DEVIATION / 74},
    "Q4_0": {0: DEVIATION / 4.6},
    "Q4_1": {0: DEVIATION / 4.6, 2: -DEVIATION * 7.5 / 4.6},
    "Q5_0": {0: DEVIATION / 9.2},
    "Q5_1": {0: DEVIATION / 9.2, 2: -DEVIATION * 15.5 / 9.2},
    "Q4_K": {0: DEVIATION / 250, 2: DEVIATION * 7.5 / 250},
    "Q5_K": {0: DEVIATION / 525, 2: DEVIATION * 15.5 / 525},
    "Q6_K": {208: DEVIATION / 1370},
    "IQ4_NL": {0: DEVIATION / 70},
    "IQ4_XS": {0: DEVIATION / 1300},
    "MXFP4": {},
}
_BLOCK_EXPONENTS = {"MXFP4": 120}  # the first byte, an exponent of two that gives about the same deviation


@dataclass(frozen=True)
class DummyWeights:
    tensors: dict[str, TensorSpec]
    seed: int
    dtype: torch.dtype
    quants: Mapping[str, str]  # formats of the quantised matrices
    device: torch.device  # generates the values; each kind of device generates different ones

    def names(self) -> list[str]:
        return list(self.tensors)

    def check(self) -> None:
        """Accept any spec: the tensors follow from it, so none is missing or has a wrong shape."""

    def get(self, name: str) -> RawTensor:
        tensor = self.tensors[name]
        if tensor.kind == "vector":
            fill = 1.0 if "norm" in name else 0.0
            return RawTensor(name, tensor.shape, torch.full(tensor.shape, fill))
        generator = torch.Generator(self.device).manual_seed(_seed(self.seed, name))
        quant = self.quants.get(name)
        if quant is not None and tensor.shape[-1] % GGML_TYPE_BY_NAME[quant].block_size == 0:
            return RawTensor(name, tensor.shape, random_blocks(tensor.shape, quant, generator), quant)
        values = torch.empty(tensor.shape, dtype=self.dtype, device=self.device)
        return RawTensor(name, tensor.shape, values.normal_(std=DEVIATION, generator=generator))


def dummy_weights(
    spec: ModelSpec,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    quant: str | None = None,
    device: torch.device | None = None,
    stored: Mapping[str, StoredFormat] | None = None,
) -> DummyWeights:
    """Return random weights. With `quant`, matrices are quantised in that format if its block size divides their rows;
    otherwise in the formats of `stored` (see `dummy_formats`)."""
    if quant is not None and quant not in _BLOCK_SCALES:
        known = ", ".join(_BLOCK_SCALES)
        raise UnsupportedModel(f"random {quant} blocks are not implemented", hint=f"these are: {known}")
    _make_generators_possible()
    tensors = tensors_of(spec)
    quants = dict.fromkeys(tensors, quant) if quant else {name: one.quant for name, one in (stored or {}).items()}
    return DummyWeights(tensors, seed, dtype, quants, device or torch.device("cpu"))


def _make_generators_possible() -> None:
    """Import the module that torch.Generator needs from torch 2.13 on; a fast start skips that import."""
    try:
        torch.Generator()
    except RuntimeError:
        import_module("torch._prims")


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "little")


def random_blocks(shape: tuple[int, ...], quant: str, generator: torch.Generator) -> torch.Tensor:
    """Return uint8 [..., bytes per row]: random bits under fixed scales."""
    kind = GGML_TYPE_BY_NAME[quant]
    row_bytes = kind.row_bytes(shape[-1])
    num_words = -(-torch.Size(shape[:-1]).numel() * row_bytes // 8)
    words = torch.empty(num_words, dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), 2**63 - 1, generator=generator)
    data = words.view(torch.uint8)[: torch.Size(shape[:-1]).numel() * row_bytes].view(-1, kind.block_bytes)
    for start, value in _BLOCK_SCALES[quant].items():
        data[:, start : start + 2] = torch.tensor([value], dtype=torch.float16).view(torch.uint8).to(data.device)
    if quant in _BLOCK_EXPONENTS:
        data[:, 0] = _BLOCK_EXPONENTS[quant]
    return data.view(*shape[:-1], row_bytes)
