"""How the parts of a model get their weights: by our own names, packed by the ops that will use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from tokenmill.models.protocol import WeightReader
from tokenmill.ops.blocks import FORMATS
from tokenmill.ops.interface import LinearWeight, Ops
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.upload import to_gpu

Part = TypeVar("Part")
NUM_READERS = 4


@dataclass(frozen=True)
class Loader:
    source: WeightReader
    ops: Ops
    dtype: torch.dtype
    device: torch.device

    def dense(self, raw: RawTensor) -> torch.Tensor:
        """Plain values in the compute dtype, on the device."""
        if self.device.type == "cuda" and (raw.quant is None or raw.quant in FORMATS):
            raw = replace(raw, data=to_gpu(raw.data, self.device))  # converted there, where it costs nothing
        return dequantize(raw, self.dtype).to(self.device)

    def each(self, make: Callable[[int], Part], count: int) -> list[Part]:
        """Parts 0 to count - 1 of a model; on a GPU several are read and sent at a time."""
        if self.device.type != "cuda":
            return [make(number) for number in range(count)]
        with ThreadPoolExecutor(NUM_READERS) as readers:
            return list(readers.map(make, range(count)))

    def vector(self, name: str) -> torch.Tensor:
        """Norm weights, biases, sinks: float32, since they are small and precision is free."""
        return dequantize(self.source.get(name), torch.float32).to(self.device)

    def linear(self, names: Sequence[str], has_bias: bool = False) -> LinearWeight:
        """Matrices `<name>.weight` with a common input as one, stacked by rows."""
        bias = torch.cat([self.vector(f"{name}.bias") for name in names]).to(self.dtype) if has_bias else None
        return self.ops.pack_linear([self.source.get(f"{name}.weight") for name in names], bias, self.dense)
