"""Small models with adapter slots, for both CPU backends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.engine.build import base_weights
from tokenmill.lora.adapter import Adapter
from tokenmill.lora.read import read_adapter
from tokenmill.models.decoder import Decoder
from tokenmill.models.forward_context import PositionTables
from tokenmill.models.linear import AdapterSlots, Loader
from tokenmill.ops.cpu.decoder import NativeDecoder
from tokenmill.ops.cpu.packing import Quantization
from tokenmill.ops.interface import Ops
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.source import WeightSource, open_weights

CPU = torch.device("cpu")
MAX_CONTEXT = 256


@dataclass(frozen=True)
class AdaptableModel:
    spec: ModelSpec
    source: WeightSource
    model: Decoder | NativeDecoder

    def read(self, path: Path) -> Adapter:
        return read_adapter(path, self.spec, base_weights(self.source))

    def put(self, slot: int, path: Path) -> None:
        self.model.adapter_slots.put(slot, self.read(path).matrices)


def adaptable_model(
    folder: Path,
    backend: str,
    num_slots: int,
    ops: Ops = REFERENCE_OPS,
    activation_bits: str = "16",
    max_rank: int = 256,
    quantization: Quantization = "none",
    expert_rank: int = 0,
    device: torch.device = CPU,
) -> AdaptableModel:
    spec = read_spec(folder)
    source = open_weights(folder, spec)
    if backend != "cpu":
        slots = AdapterSlots(num_slots, max_rank, expert_rank)
        loader = Loader(source, ops, torch.float32, device, slots)
        return AdaptableModel(spec, source, Decoder(spec, loader, MAX_CONTEXT))
    tables = PositionTables.of(spec, MAX_CONTEXT, CPU).ropes
    ropes = {rope: (table.cos, table.sin) for rope, table in tables.items()}
    model = NativeDecoder(
        spec,
        source,
        ropes,
        lambda raw: dequantize(raw, torch.float32),
        threads=1,
        quantization=quantization,
        activation_bits=activation_bits,
        num_adapter_slots=num_slots,
    )
    return AdaptableModel(spec, source, model)
