"""Time of a step by the roofline model: the slower of arithmetic and memory, plus a fixed cost per step.

    prefill   FLOPs / (peak FLOP/s × MFU)        of one prompt, or its bytes if it is very short
    decode    bytes / (peak bandwidth × MBU)     of the weights read once and the KV of every sequence, or its FLOPs

For a calibrated machine, measured at several batch sizes, the two parts add up (`overlap=False`), as fits to real steps
show: no kernel overlaps them fully.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tokenmill.arch.cost import WeightParts, decode_step_bytes, decode_step_flops, prefill_flops, weights_read_bytes
from tokenmill.arch.outline import Model
from tokenmill.planner.device import PlanDevice
from tokenmill.planner.memory import Split

ALL_REDUCE_S = 8e-6  # the latency of one collective; two a layer
STEP_S = {True: 1e-3, False: 3e-4}  # host time per step: on a CPU; on a GPU, where the host runs ahead


@dataclass(frozen=True)
class Speeds:
    """Speeds that a program reaches on a device."""

    prefill_flops_s: float
    decode_flops_s: float
    bandwidth_bytes_s: float
    step_s: float
    overlap: bool = True

    @classmethod
    def of_device(cls, device: PlanDevice, weight_dtype: str) -> Speeds:
        flops = device.peak_flops(weight_dtype) * device.mfu
        return cls(flops, flops, device.peaks.bandwidth_bytes_s * device.mbu, STEP_S[device.is_cpu])

    def combine(self, compute_s: float, memory_s: float) -> float:
        return max(compute_s, memory_s) if self.overlap else compute_s + memory_s


@dataclass(frozen=True)
class Roofline:
    spec: Model
    parts: WeightParts
    kv_dtype: str
    device: PlanDevice
    split: Split
    speeds: Speeds

    def prefill_s(self, num_tokens: int, *, batch: int = 1) -> float:
        """Return the time to the first token of `batch` prompts computed together."""
        flops = batch * prefill_flops(self.spec, num_tokens, causal=False)
        moved = weights_read_bytes(self.spec, self.parts, batch * num_tokens)
        compute = flops / self.speeds.prefill_flops_s / self.split.tensor
        memory = moved / self.speeds.bandwidth_bytes_s / self.split.tensor
        return max(compute, memory) + self._exchange_s(batch * num_tokens) + self.speeds.step_s

    def decode_s(self, batch: int, context: int) -> float:
        """Return the time of one token for each of `batch` sequences. Pipeline stages compute shares of the batch in
        turn."""
        share = ceil(batch / self.split.pipeline)  # the fullest one sets the pace
        moved = decode_step_bytes(self.spec, self.parts, self.kv_dtype, share, context)
        flops = decode_step_flops(self.spec, share, context)
        memory = moved / self.speeds.bandwidth_bytes_s / self.split.tensor
        compute = flops / self.speeds.decode_flops_s / self.split.tensor
        return self.speeds.combine(compute, memory) + self._exchange_s(share) + self.speeds.step_s

    def decode_tok_s(self, batch: int, context: int) -> float:
        """Return the tokens per second of all sequences together."""
        return batch / self.decode_s(batch, context)

    def _exchange_s(self, num_tokens: int) -> float:
        """Return the time of two all-reduces per layer: latency, and each device sends nearly twice its activations."""
        t = self.split.tensor
        if t == 1:
            return 0.0
        moved = 2 * (t - 1) / t * num_tokens * self.spec.hidden_size * 2
        return self.spec.num_layers * 2 * (ALL_REDUCE_S + moved / self.device.link_bytes_s)


def quick_flops(num_active_parameters: int, num_tokens: int) -> float:
    """Return the common estimate: two operations per parameter and token."""
    return 2.0 * num_active_parameters * num_tokens
