"""Peaks of the machine, and the share of them that a served load used: MFU and MBU over the whole run.

FLOPs   of every prompt (without its cached part) and of every decoded token at its context
bytes   a decode step reads the weights once for all running requests, and the KV cache of each; the number of steps is
        the decoded tokens divided by the mean number of running requests
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.arch.cost import (
    WeightParts,
    decode_flops,
    gguf_weight_parts,
    kv_bytes,
    prefill_flops,
    weight_parts,
    weights_read_bytes,
)
from tokenmill.arch.gguf_file import read_gguf_model
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.bench.request_records import BenchRecord
from tokenmill.errors import InvalidConfig
from tokenmill.hardware.machine import Machine, probe_machine
from tokenmill.hardware.measured import measure_cpu
from tokenmill.hardware.peaks import DevicePeaks, PeakDType, find_device

MEASURE_S = 1.5


@dataclass(frozen=True)
class Peaks:
    """Peak bandwidth and arithmetic of the machine, measured on a CPU, listed for a GPU."""

    device: str
    source: str  # "measured" or "listed"
    bandwidth_bytes_s: float
    flops: float
    flops_dtype: str

    def as_dict(self) -> dict[str, Any]:
        return {f"peak_{name}": value for name, value in vars(self).items()}


def machine_peaks(device: str, dtype: str, threads: int | None) -> Peaks | None:
    """Return the peaks of this machine; None for a GPU that is not in the table."""
    if device == "cpu":
        return measured_peaks(dtype, threads)
    machine = probe_machine()
    listed = listed_device(machine)
    if listed is None:
        return None
    kinds: dict[str, PeakDType] = {"float32": "fp32", "fp8": "fp8"}  # 4-bit matrices are expanded for many rows
    kind = kinds.get(dtype, "bf16")
    return Peaks(listed.name, "listed", listed.bandwidth_bytes_s, listed.flops_for(kind), kind)


def measured_peaks(dtype: str, threads: int | None) -> Peaks:
    found = measure_cpu(threads, MEASURE_S)
    uses_int8 = dtype not in ("float32", "bfloat16", "float16") and found.int8_flops is not None
    flops = found.int8_flops if uses_int8 and found.int8_flops else found.fp32_flops
    name = probe_machine().cpu.name
    return Peaks(name, "measured", found.bandwidth_bytes_s, flops, "int8" if uses_int8 else "fp32")


def listed_device(machine: Machine) -> DevicePeaks | None:
    return find_device(machine.gpus[0].name) if machine.gpus else None


KV_DTYPE = "bfloat16"


def utilisation(records: Sequence[BenchRecord], model: Path, device: str) -> dict[str, float]:
    peaks, spec = known_device(device), read_spec(model)
    parts = gguf_weight_parts(read_gguf_model(model)) if model.suffix == ".gguf" else weight_parts(spec, "bfloat16")
    done = [record for record in records if record.is_ok]
    if not done:
        return {"mfu": 0.0, "mbu": 0.0}
    span = max(r.end_s for r in done) - min(r.sent_s for r in done)
    return {
        "mfu": total_flops(spec, done) / span / peaks.flops_for("bf16"),
        "mbu": total_bytes(spec, parts, done, span) / span / peaks.bandwidth_bytes_s,
    }


def known_device(name: str) -> DevicePeaks:
    peaks = find_device(name)
    if peaks is None:
        raise InvalidConfig(f"no device is called {name!r}", param="device", hint="tokenmill plan --devices")
    return peaks


def total_flops(spec: ModelSpec, done: Sequence[BenchRecord]) -> float:
    total = 0.0
    for record in done:
        prompt, cached = record.input_tokens or record.asked_input, record.cached_tokens or 0
        total += prefill_flops(spec, max(1, prompt - cached), start=cached)
        total += record.num_tokens * decode_flops(spec, max(1, prompt + record.num_tokens // 2))
    return total


def total_bytes(spec: ModelSpec, parts: WeightParts, done: Sequence[BenchRecord], span: float) -> float:
    tokens = sum(record.num_tokens for record in done)
    running = max(1.0, sum(record.e2e_s for record in done) / span)
    weights = tokens / running * weights_read_bytes(spec, parts, round(running))
    contexts = ((r.num_tokens, (r.input_tokens or r.asked_input) + r.num_tokens // 2) for r in done)
    return weights + sum(count * kv_bytes(spec, KV_DTYPE, context) for count, context in contexts)
