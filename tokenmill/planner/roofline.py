"""Time of a step by the roofline model: the slower of arithmetic and memory, plus a fixed cost per step.

    prefill   FLOPs / (peak FLOP/s × MFU)        of one prompt, or its bytes if it is very short
    decode    bytes / (peak bandwidth × MBU)     of the weights read once and the KV of every sequence, or its FLOPs

Split over devices, a step takes a tensor split's part of that, and what devices exchange (`links.py`). The stages of a
pipeline compute the lanes of a batch at the same time; the slowest one sets the pace.

Of a decode step, a part of the arithmetic is not hidden behind memory, and each layer's kernels take a fixed time more
on a GPU, above all recurrent ones, which are many and small. Where no kernel overlaps arithmetic and memory they add up
(`overlap=False`): on a calibrated machine, as fits to steps measured at several batch sizes show, and on a GPU with
quantised integers, which kernels expand to 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from tokenmill.arch.cost import WeightParts, decode_step_bytes, decode_step_flops, prefill_flops, weights_read_bytes
from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME
from tokenmill.arch.outline import Model, outline_of
from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.spec import ModelSpec
from tokenmill.planner.device import PlanDevice
from tokenmill.planner.links import pipeline_share
from tokenmill.planner.memory import Split

GATHERS = 4  # of a layer, where matrices are split by rows
VALUE_BYTES = 2  # of what is exchanged
STEP_S = {True: 1e-3, False: 0.0}  # host time per step: on a CPU; on a GPU, where the host runs ahead
# Fitted to decode steps on an H200 (`benchmarks/results`), which they predict within 18 %: Llama 1B and 8B (bfloat16,
# fp8, 4 bits), one rank of eight of a 70B model, Qwen3-30B-A3B, DeepSeek-V2-Lite and Qwen3.5-35B-A3B.
LAYER_S = 19e-6  # of a layer's kernels on a GPU, beside arithmetic and memory
RECURRENT_LAYER_S = 85e-6  # more for the small kernels of a recurrent layer
EXPANDED_LAYER_S = 15e-6  # more for a layer whose matrices are expanded
EXPANDING_SPEED = 1.25  # FLOP/s of such products in a decode step, relative to prefill
EXPOSED_ARITHMETIC = 1 / 3  # the part of a decode step's arithmetic that reading memory does not hide
UNQUANTISED = ("float32", "bfloat16", "float16", "F32", "BF16", "F16")


@dataclass(frozen=True)
class Speeds:
    """Speeds that a program reaches on a device."""

    prefill_flops_s: float
    decode_flops_s: float
    bandwidth_bytes_s: float
    step_s: float
    overlap: bool = True
    exposed: float = 0.0  # the part of arithmetic that reading memory does not hide, where they overlap
    layer_s: float = 0.0  # of each layer, in addition to arithmetic and memory
    recurrent_layer_s: float = 0.0  # and of each recurrent one

    @classmethod
    def of_device(cls, device: PlanDevice, weight_dtype: str) -> Speeds:
        flops = device.peak_flops(weight_dtype) * device.mfu
        speeds = cls(flops, flops, device.peaks.bandwidth_bytes_s * device.mbu, STEP_S[device.is_cpu])
        if device.is_cpu:
            return speeds
        if is_expanded(weight_dtype):
            layer_s, decode_flops_s = LAYER_S + EXPANDED_LAYER_S, flops * EXPANDING_SPEED
            speeds = replace(speeds, overlap=False, decode_flops_s=decode_flops_s, layer_s=layer_s)
        else:
            speeds = replace(speeds, exposed=EXPOSED_ARITHMETIC, layer_s=LAYER_S)
        return replace(speeds, recurrent_layer_s=RECURRENT_LAYER_S)

    def combine(self, compute_s: float, memory_s: float) -> float:
        return max(compute_s, memory_s + self.exposed * compute_s) if self.overlap else compute_s + memory_s


@dataclass(frozen=True)
class Roofline:
    spec: Model
    parts: WeightParts
    kv_dtype: str
    device: PlanDevice
    split: Split
    speeds: Speeds

    def prefill_busy_s(self, num_tokens: int) -> float:
        """Return the time that a prompt takes from all others: stages compute several prompts at the same time."""
        return self.prefill_s(num_tokens) / self.split.pipeline / self.stage_share

    @cached_property
    def stage_share(self) -> float:
        """The part of the time that a stage computes, 1 where there is one: stages have uneven work, and wait."""
        stages = self.split.pipeline
        return 1.0 if stages == 1 else pipeline_share(stages) / (stages * self.split.slowest_stage(self.spec))

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
        layers_s = self.spec.num_layers * self.speeds.layer_s + self._num_recurrent * self.speeds.recurrent_layer_s
        own_s = self.speeds.combine(compute, memory) + layers_s + self.speeds.step_s
        waits = batch >= self.split.pipeline  # until then a lane finds every stage free
        return own_s / (self.stage_share if waits else 1.0) + self._exchange_s(share)

    def decode_tok_s(self, batch: int, context: int) -> float:
        """Return the tokens per second of all sequences together."""
        return batch / self.decode_s(batch, context)

    def _exchange_s(self, num_tokens: int) -> float:
        """Return the time of what devices exchange in a step: four gathers a layer (heads, inner numbers, and the
        stream behind each) or two sums, and the stream from stage to stage."""
        link, split, stream = self.device.link, self.split, num_tokens * self.spec.hidden_size * VALUE_BYTES
        if split.has_sums:
            inside_s = self.spec.num_layers * 2 * link.sum_s(stream, split.tensor)
        else:
            moved = num_tokens * VALUE_BYTES * self._gathered_values
            gathers = GATHERS * self.spec.num_layers
            inside_s = gathers * link.gather_s(moved / gathers, split.tensor)
        return inside_s + (split.pipeline * link.send_s(stream) if split.pipeline > 1 else 0.0)

    @cached_property
    def _num_recurrent(self) -> int:
        if isinstance(self.spec, ModelSpec):
            return sum(any(isinstance(mixer, Recurrent) for mixer in layer.mixers) for layer in self.spec.layers)
        return sum(layer.state_values > 0 for layer in self.spec.layers)

    @cached_property
    def _gathered_values(self) -> int:
        """Values of a token that ranks gather in all layers; a layer's widest place has gates, ups and products."""
        layers = outline_of(self.spec).layers
        return sum(layer.pair_values // 2 + layer.width // 3 + 2 * self.spec.hidden_size for layer in layers)

    def exchange_share(self, batch: int, context: int) -> float:
        """The part of a decode step that devices exchange in."""
        return self._exchange_s(ceil(batch / self.split.pipeline)) / self.decode_s(batch, context)


def is_expanded(weight_dtype: str) -> bool:
    """Tell whether GPUs expand such weights to 16 bits while they multiply."""
    return weight_dtype in ("int4", "int8") or (weight_dtype in GGML_TYPE_BY_NAME and weight_dtype not in UNQUANTISED)


def quick_flops(num_active_parameters: int, num_tokens: int) -> float:
    """Return the common estimate: two operations per parameter and token."""
    return 2.0 * num_active_parameters * num_tokens
