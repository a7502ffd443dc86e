"""How the parts of a model get their weights: by our own names, packed by the ops that will use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmill.models.protocol import WeightSource
from tokenmill.ops.interface import LinearWeight, Ops
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.dequantize import dequantize


@dataclass(frozen=True)
class Loader:
    source: WeightSource
    ops: Ops
    dtype: torch.dtype
    device: torch.device

    def dense(self, raw: RawTensor) -> torch.Tensor:
        """Plain values in the compute dtype, on the device."""
        return dequantize(raw, self.dtype).to(self.device)

    def vector(self, name: str) -> torch.Tensor:
        """Norm weights, biases, sinks: float32, since they are small and precision is free."""
        return dequantize(self.source.get(name), torch.float32).to(self.device)

    def linear(self, names: Sequence[str], has_bias: bool = False) -> LinearWeight:
        """Matrices `<name>.weight` with a common input as one, stacked by rows."""
        bias = torch.cat([self.vector(f"{name}.bias") for name in names]).to(self.dtype) if has_bias else None
        return self.ops.pack_linear([self.source.get(f"{name}.weight") for name in names], bias, self.dense)
