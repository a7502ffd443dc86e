"""The tables of devices and backends: what computes a model where, and how much memory that takes.

    Device    cuda, cpu                  what all backends on a device share: limits, precision, runner and memory
    Backend   triton, cpu, reference     which models it can compute, the formats of their weights, how a model is built

`resolve` walks the rows and collects their reasons; the planner, `doctor` and the benchmarks use the same rows.
Supporting another vendor's GPU takes a row here and a folder in `ops`. Importing this file does not import torch, which
the planner does not need: a row imports its modules when it builds something.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from statistics import mode
from typing import TYPE_CHECKING, Protocol

from tokenmill.arch.cost import (
    DTYPE_BYTES,
    ComputeDType,
    WeightParts,
    bytes_per_value,
    gguf_weight_parts,
    gpu_dtype,
    weight_parts,
)
from tokenmill.arch.gguf_file import read_gguf_model
from tokenmill.arch.mtp import first_extra_layer, has_mtp_head, mtp_parameters
from tokenmill.arch.outline import Model as ModelShape
from tokenmill.arch.packed_formats import WIDE_FORMATS, is_expanded, stored_formats, widened
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import EngineConfig
from tokenmill.config.engine import CPU_LIMITS, BackendName, DeviceName, gpu_limits
from tokenmill.hardware.machine import probe_machine
from tokenmill.ops import cpu as native_kernels
from tokenmill.ops import triton as triton_kernels
from tokenmill.ops.compute_request import ROUNDED_LATENTS, ComputeRequest
from tokenmill.runner.memory import (
    GPU_START_BYTES,
    NO_RUNNER_BYTES,
    NOTHING_STORED,
    Formats,
    RunnerBytes,
    RunnerLimits,
    gpu_weight_parts,
    runner_bytes,
)
from tokenmill.weights.locate import stored_bytes

if TYPE_CHECKING:
    from tokenmill.engine.core import Runner
    from tokenmill.kv.storage import KVStorage
    from tokenmill.models.protocol import Model, StagedModel
    from tokenmill.parallel.group import Shard
    from tokenmill.sampling.sampler import Sampler
    from tokenmill.weights.source import WeightSource

FLOATS = ("float32", "bfloat16", "float16")


# ── devices ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Device:
    """A kind of device: the properties shared by all backends on it."""

    name: DeviceName  # also torch's name
    title: str
    memory_fraction: float
    """Default share of the memory left after loading that the KV cache may take."""
    start_bytes: int
    """Memory of loaded kernels, in addition to weights, pool and workspace."""
    overlaps_steps: bool
    """Whether the next step is launched before the tokens of this one are known, too early to verify drafts."""
    batch_notes: tuple[str, str] | None
    """The notes about tokens that depend on the batch, with and without --deterministic; None: they never do."""
    free_bytes: Callable[[], int | None]
    """Memory that is free now; None if torch can't use such a device."""
    limits: Callable[[int], tuple[int, int]]
    """Free bytes → default (max_running, token_budget)."""
    compute_dtype: Callable[[ModelShape, bool], ComputeDType]
    """(model, whether small models too use 16 bits) → the default precision of activations."""
    dtype_note: Callable[[ModelShape, str], str]
    """(model, compute dtype) → the reason for the default, and the flag to change it."""
    workspace_bytes: Callable[[ModelSpec, RunnerLimits, float], RunnerBytes]
    """(model, limits, share of each matrix on one of several devices) → the runner's memory besides the weights."""
    make_runner: Callable[[Model, KVStorage, Sampler, int, int], Runner]
    runner_package: str | None = None
    """A package that the runner needs and that may not be installed."""


def _free_gpu_bytes() -> int | None:
    import torch

    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def _gpu_dtype_note(spec: ModelShape, dtype: str) -> str:
    if dtype == "float32":
        return ", because 16 bits visibly change a small model's answers (--dtype bfloat16: prompts twice as fast)"
    if spec.dtype == "float32":
        return ", rounded from the file's float32 (--dtype float32: full precision, slower)"
    return ""


def _cuda_runner(model: Model, storage: KVStorage, sampler: Sampler, max_rows: int, max_context: int) -> Runner:
    from tokenmill.runner.cuda_runner import CudaRunner  # needs Triton, which may be missing on machines without a GPU

    return CudaRunner(model, storage, sampler, max_rows, max_context)


def _cpu_runner(model: Model, storage: KVStorage, sampler: Sampler, max_rows: int, max_context: int) -> Runner:
    from tokenmill.runner.runner import ModelRunner

    return ModelRunner(model, storage, sampler, max_rows, max_context)


CUDA = Device(
    name="cuda",
    title="GPU",
    memory_fraction=0.9,
    start_bytes=GPU_START_BYTES,
    overlaps_steps=True,
    batch_notes=(
        "deterministic: a request's tokens do not depend on the rest of the batch, at some cost in speed",
        "fastest order of sums: the last bits of a request's logits may depend on its batch "
        "(--deterministic: never, at some cost in speed)",
    ),
    free_bytes=_free_gpu_bytes,
    limits=gpu_limits,
    compute_dtype=lambda spec, prefers_16_bits: gpu_dtype(spec, prefers_16_bits=prefers_16_bits),
    dtype_note=_gpu_dtype_note,
    workspace_bytes=lambda spec, limits, share: runner_bytes(spec, limits, share=share),
    make_runner=_cuda_runner,
    runner_package="triton",
)
CPU = Device(
    name="cpu",
    title="CPU",
    memory_fraction=0.25,
    start_bytes=0,
    overlaps_steps=False,
    batch_notes=None,
    free_bytes=lambda: probe_machine().memory.available_bytes,
    limits=lambda _free_bytes: CPU_LIMITS,
    compute_dtype=lambda _spec, _prefers_16_bits: "float32",
    dtype_note=lambda _spec, _dtype: "",
    workspace_bytes=lambda _spec, _limits, _share: NO_RUNNER_BYTES,
    make_runner=_cpu_runner,
)
DEVICES = (CUDA, CPU)  # in order of preference


def find_device(name: str) -> Device:
    return next(device for device in DEVICES if device.name == name)


# ── backends ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class StoredWeights:
    """The formats and sizes of a model's weights in its files, read on demand."""

    spec: ModelSpec
    path: Path | None  # None: random weights, which have no file
    known_formats: Formats | None = None  # for random weights: the formats named in the config

    @cached_property
    def parts(self) -> WeightParts:
        if self.path is None:
            return weight_parts(self.spec, "float32")
        if self.path.suffix == ".gguf":
            return gguf_weight_parts(read_gguf_model(self.path), first_extra_layer(self.spec))
        if is_expanded(self.path):
            return weight_parts(self.spec, "float16")
        plain = weight_parts(self.spec, self.dtype)
        head_bytes = 0.0  # a head that predicts further tokens is in the files, but not part of `plain`
        if self.spec.num_extra_layers and has_mtp_head(self.spec):
            head_bytes = mtp_parameters(self.spec) * bytes_per_value(self.dtype)
        share = stored_bytes(self.path) / (plain.total + head_bytes)
        parts = (plain.embedding, plain.experts, plain.rest, plain.tables)
        return WeightParts(*(int(part * share) for part in parts))

    @cached_property
    def dtype(self) -> str:
        """The data type of most of the weights."""
        if self.path is None:
            return "float32"
        if self.path.suffix != ".gguf":
            return self.spec.dtype if self.spec.dtype in DTYPE_BYTES else "float32"
        sizes: Counter[str] = Counter()
        for tensor in read_gguf_model(self.path).tensors.values():
            sizes[tensor.type] += tensor.num_bytes
        return sizes.most_common(1)[0][0]

    @cached_property
    def formats(self) -> Formats:
        """The block format of each matrix that is stored in one."""
        if self.known_formats is not None:
            return self.known_formats
        return NOTHING_STORED if self.path is None else stored_formats(self.path, self.spec)


@dataclass(frozen=True)
class KeptWeights:
    """The formats in which a backend keeps a model's weights in memory, and their sizes."""

    parts: WeightParts
    dtype: str  # of most of them
    expands_weights: bool = False
    """Whether some matrices stay quantised and are expanded piecewise for steps of many tokens."""


class BuildModel(Protocol):
    def __call__(
        self, config: EngineConfig, spec: ModelSpec, source: WeightSource, shard: Shard | None = None
    ) -> StagedModel:
        """`shard`: this rank's part of the model, if there are several ranks; spec and source describe that part."""
        ...


@dataclass(frozen=True)
class Backend:
    """A set of kernels: which models it can compute, and how one is built."""

    name: BackendName
    title: str
    devices: tuple[Device, ...]
    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    quantizations: tuple[str, ...]
    """The formats that unquantised weights can be converted to while they are loaded."""
    is_slow: bool
    uses_torch_threads: bool
    """False: the kernels have their own threads, and torch's would compete for the same cores."""
    kernel_limits: Callable[[ComputeRequest], str | None]
    """Why the kernels can't compute this model; None if they can."""
    default_kv_dtype: Callable[[ModelShape, str, str], str]
    """(model, compute dtype, quantization) → the default precision of the KV cache."""
    kept_weights: Callable[[StoredWeights, ComputeRequest], KeptWeights]
    build_model: BuildModel
    describe_kernels: Callable[[EngineConfig], str]
    rank_limits: Callable[[Device], str | None]
    """Why several ranks on such devices can't compute a model with it; None if they can."""

    def unsupported_reason(self, request: ComputeRequest) -> str | None:
        """Return why this backend can't compute the request; None if it can."""
        if request.device not in [device.name for device in self.devices]:
            return f"it computes on a {' or '.join(device.title for device in self.devices)}, not on {request.device}"
        if request.dtype not in self.dtypes:
            return f"{self.title} do not support activations in {request.dtype}, only {_either(self.dtypes)}"
        if request.kv_dtype not in self.kv_dtypes:
            return f"{self.title} do not support a KV cache in {request.kv_dtype}, only {_either(self.kv_dtypes)}"
        if request.quantization not in self.quantizations:
            only = _either(self.quantizations)
            return f"{self.title} do not support quantization {request.quantization}, only {only}"
        return self.kernel_limits(request)


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _needs_linux() -> str | None:
    """Return why this system does not support several ranks; None if it does."""
    return None if sys.platform == "linux" else "ranks need Linux"


def _missing_package(request: ComputeRequest) -> str | None:
    package = find_device(request.device).runner_package
    is_missing = package is not None and find_spec(package) is None
    return f"{package} is not installed (pip install {package})" if is_missing else None


# ── Triton ─────────────────────────────────────────────────────────────────────────────────────────────


def _kept_by_triton(stored: StoredWeights, request: ComputeRequest) -> KeptWeights:
    """Return the kept weights: quantised matrices stay in the file's format, except for float32 and deterministic
    sums, which expand them."""
    quantization = request.quantization
    is_expanded = request.deterministic or (quantization == "none" and request.dtype == "float32")
    formats = NOTHING_STORED if is_expanded else _kept_formats(stored, request.dtype)
    parts = gpu_weight_parts(stored.spec, int(DTYPE_BYTES[request.dtype]), quantization, formats)
    kept = [one.quant for one in formats.values()]
    label = mode(kept) if kept else request.dtype if quantization == "none" else quantization
    has_integers = any(quant != "F8" for quant in kept) or quantization in ("int4", "int8")
    return KeptWeights(parts, label, expands_weights=has_integers)


def _kept_formats(stored: StoredWeights, dtype: str) -> Formats:
    """Return the formats of a file that are kept: fp8 only if this GPU multiplies fp8; 4-bit floats and table codes
    are widened to 8 bits, or not kept, if it can't expand them fast."""
    quants = {one.quant for one in stored.formats.values()}
    kept = stored.formats
    if "F8" in quants and not triton_kernels.has_fp8("cuda"):
        kept = {name: one for name, one in kept.items() if one.quant != "F8"}
    has_fp4 = not quants.isdisjoint(WIDE_FORMATS)
    return widened(kept) if has_fp4 and not triton_kernels.keeps_fp4("cuda", dtype) else kept


def _build_with_triton(
    config: EngineConfig, spec: ModelSpec, source: WeightSource, shard: Shard | None = None
) -> StagedModel:
    from tokenmill.engine.model import build_decoder
    from tokenmill.ops.triton.build import build_ops

    ops = build_ops(config.model.quantization, deterministic=config.ops.deterministic)
    return build_decoder(config, spec, source, ops, shard)


def _gpu_rank_limits(_device: Device) -> str | None:
    import torch

    if torch.version.hip is not None:
        return "ranks on AMD GPUs are not supported: they exchange through CUDA memory handles"
    return _needs_linux()


TRITON = Backend(
    name="triton",
    title="Triton kernels",
    devices=(CUDA,),
    dtypes=FLOATS,
    kv_dtypes=(*FLOATS, "int8", "fp8"),
    quantizations=("none", "fp8", "int8", "int4"),
    is_slow=False,
    uses_torch_threads=True,
    kernel_limits=lambda request: _missing_package(request) or triton_kernels.unsupported_reason(request),
    default_kv_dtype=lambda _spec, dtype, _quantization: dtype,
    kept_weights=_kept_by_triton,
    build_model=_build_with_triton,
    describe_kernels=lambda config: f"ops: Triton kernels on {config.ops.device}",
    rank_limits=_gpu_rank_limits,
)


# ── native CPU kernels ─────────────────────────────────────────────────────────────────────────────────


def _native_kv_dtype(spec: ModelShape, dtype: str, quantization: str) -> str:
    """Return the default KV precision of the native kernels, which compute in float32. For weights with less precision
    than float32, float16 keys and values do not change answers visibly, and halve the bytes to read."""
    is_rounded = spec.dtype != "float32" or quantization != "none"
    return "float16" if is_rounded else dtype


def _kept_by_native(stored: StoredWeights, request: ComputeRequest) -> KeptWeights:
    """Return the kept weights: in the file's precision, or in 8-bit blocks if that is requested and smaller."""
    in_blocks = weight_parts(stored.spec, "Q8_0", vector_dtype="float32")
    is_smaller = request.quantization == "int8" and in_blocks.total < stored.parts.total
    return KeptWeights(in_blocks, "int8") if is_smaller else KeptWeights(stored.parts, stored.dtype)


def _build_native(
    config: EngineConfig, spec: ModelSpec, source: WeightSource, shard: Shard | None = None
) -> StagedModel:
    from tokenmill.engine.model import build_native_decoder

    return build_native_decoder(config, spec, source, shard)


NATIVE = Backend(
    name="cpu",
    title="native kernels",
    devices=(CPU,),
    dtypes=("float32",),
    kv_dtypes=(*FLOATS, "int8"),
    quantizations=("none", "int8"),
    is_slow=False,
    uses_torch_threads=False,
    kernel_limits=native_kernels.unsupported_reason,
    default_kv_dtype=_native_kv_dtype,
    kept_weights=_kept_by_native,
    build_model=_build_native,
    describe_kernels=lambda _config: f"ops: native kernels ({native_kernels.instruction_set()})",
    rank_limits=lambda _device: _needs_linux(),
)


# ── torch's reference ──────────────────────────────────────────────────────────────────────────────────


def _reference_limits(request: ComputeRequest) -> str | None:
    if request.rounds_latents:
        return ROUNDED_LATENTS
    if request.deterministic and find_device(request.device).batch_notes is not None:
        return "torch's sums on a GPU depend on the batch, so deterministic is not supported"
    if request.device != "cpu" and request.spec.recurrences:
        return "torch's ops support recurrent layers only on a CPU: they read the layers' tables on the host"
    return _missing_package(request)


def _kept_by_reference(stored: StoredWeights, request: ComputeRequest) -> KeptWeights:
    """Return the kept weights: all expanded to the compute dtype."""
    return KeptWeights(gpu_weight_parts(stored.spec, int(DTYPE_BYTES[request.dtype])), request.dtype)


def _build_with_torch(
    config: EngineConfig, spec: ModelSpec, source: WeightSource, shard: Shard | None = None
) -> StagedModel:
    from tokenmill.engine.model import build_decoder
    from tokenmill.ops.reference import REFERENCE_OPS

    return build_decoder(config, spec, source, REFERENCE_OPS, shard)


def _torch_rank_limits(device: Device) -> str | None:
    if device is not CPU:
        return "ranks on GPUs exchange with Triton kernels"
    return _needs_linux()


REFERENCE = Backend(
    name="reference",
    title="torch's ops",
    devices=(CUDA, CPU),
    dtypes=FLOATS,
    kv_dtypes=(*FLOATS, "int8", "fp8"),
    quantizations=("none",),
    is_slow=True,
    uses_torch_threads=True,
    kernel_limits=_reference_limits,
    default_kv_dtype=lambda _spec, dtype, _quantization: dtype,
    kept_weights=_kept_by_reference,
    build_model=_build_with_torch,
    describe_kernels=lambda config: f"ops: torch's reference on {config.ops.device}",
    rank_limits=_torch_rank_limits,
)

BACKENDS = (TRITON, NATIVE, REFERENCE)  # in order of preference; the last one supports everything in a ModelSpec


def default_kv_dtype(model: ModelShape, backend: Backend, dtype: str | None = None) -> str:
    """Return the KV cache's default precision; `dtype`: the compute precision, by default the device's default."""
    return backend.default_kv_dtype(model, dtype or backend.devices[0].compute_dtype(model, False), "none")


def find_backend(name: str) -> Backend:
    return next(backend for backend in BACKENDS if backend.name == name)
