"""`tokenmill doctor`: check the machine. The exit code is 1 if something must be fixed."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tokenmill
from tokenmill.arch.cost import gpu_dtype
from tokenmill.arch.packed_formats import stored_formats
from tokenmill.arch.read import read_spec
from tokenmill.arch.unproven import VARIABLE, not_chosen
from tokenmill.cli.output import print_facts, size
from tokenmill.config import EngineConfig, ModelConfig
from tokenmill.engine.resolve import explain_choices, unused_gpu
from tokenmill.errors import InvalidConfig, TokenmillError
from tokenmill.hardware.gpu import Gpu, driver_version
from tokenmill.hardware.machine import Machine, probe_machine
from tokenmill.hardware.peaks import find_device
from tokenmill.ops.cpu import is_available
from tokenmill.store import DEFAULT_MODEL, Manifest, Store, resolve_model
from tokenmill.store.fetched import nearest_existing

if TYPE_CHECKING:
    from tokenmill.ops.triton.describe import Range
    from tokenmill.ops.triton.launch.capabilities import Capabilities

PACKAGES = (
    "torch",
    "tokenizers",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "llguidance",
    "starlette",
    "triton",
    "transformers",
)
LOW_MEMORY_BYTES = 2 << 30
LOW_DISK_BYTES = 2 << 30

Row = tuple[str, str]


def command(
    *,
    kernels: str | None = None,
    device: str | None = None,
    quantization: Literal["none", "fp8", "int4", "int8"] = "none",
    context: int = 4096,
) -> int:
    """Check this machine: hardware, chosen settings and why, what to fix.

    Parameters
    ----------
    kernels
        Model for which to print the GPU kernel that multiplies each of its matrices, for 1 to 4,096 rows, and why.
    device
        GPU for --kernels, by name (H200, A100, L4, RTX4090, ...); it need not be installed.
    quantization
        Quantisation of unquantised weights that --kernels assumes.
    context
        Context length in tokens that --kernels assumes.
    """
    if kernels is not None:
        return print_kernels(kernels, device, quantization, context)
    if device is not None or quantization != "none":
        raise InvalidConfig("--device and --quantization need --kernels MODEL")
    machine, store = probe_machine(), Store()
    manifests = store.manifests()
    print_facts([("tokenmill", f"{tokenmill.__version__}, Python {machine.python}, {machine.system}")])
    _section("Hardware", hardware_rows(machine))
    _section("Packages", package_rows())
    _section("Store", store_rows(store, manifests))
    choices, refusal = choice_rows(store, manifests)
    _section("Chosen for this machine", choices)
    must, should = to_fix(machine, store, manifests)
    must += [refusal] if refusal else []
    _section("To fix", [("!", line) for line in must] + [("-", line) for line in should] or [("", "nothing")])
    return 1 if must else 0


def print_kernels(model: str, device: str | None, quantization: str, context: int) -> int:
    """Print which GPU kernel would compute each part of a model, and why; needs no GPU."""
    import torch

    from tokenmill.ops.triton.describe import PlannedWeights, describe_kernels

    path = Path(model).expanduser()
    if not (path.is_file() and path.suffix == ".json"):  # a bare config.json is enough
        path = resolve_model(model, allow_pull=False).path
    spec, gpu = read_spec(path), _gpu_for(device)
    dtype = gpu_dtype(spec)
    weights = PlannedWeights(getattr(torch, dtype), quantization, stored_formats(path, spec))
    print_facts([("model", f"{model}, computed in {dtype}"), ("gpu", gpu.device), ("tuning", gpu.origin)])
    for section in describe_kernels(spec, weights, min(context, spec.max_context), gpu):
        _section(section.title, [(f"{section.unit} {_span(one)}", _kernels(one)) for one in section.ranges])
    if rows := unproven_rows():
        _section(f"Not selected: kernels that have not been verified on a GPU ({VARIABLE}=1 enables them)", rows)
    return 0


def unproven_rows() -> list[Row]:
    return [(name, f"{trial.what} (instead: {trial.instead})") for name, trial in not_chosen()]


def _gpu_for(device: str | None) -> Capabilities:
    """Return the named GPU, or the first installed one, or an H200."""
    from tokenmill.ops.triton.launch.capabilities import TUNED, describe_gpu, known_tunings, named_gpu

    if device is not None:
        return named_gpu(device)
    gpu = next((gpu for gpu in probe_machine().gpus if gpu.vendor == "nvidia"), None)
    if gpu is None:
        found = named_gpu(TUNED)
        return replace(found, device=f"no GPU installed: shown for an {found.device} (--device selects another)")
    digits = gpu.architecture.removeprefix("sm_").rstrip("af")
    return describe_gpu(gpu.name, (int(digits[:-1]), int(digits[-1])), known_tunings())


def _span(one: Range) -> str:
    return f"{one.first:,}" if one.first == one.last else f"{one.first:,} to {one.last:,}"


def _kernels(one: Range) -> str:
    names = one.eager if one.eager == one.captured else f"{one.captured} in graphs, {one.eager} otherwise"
    return f"{names} ({one.why})"


def hardware_rows(machine: Machine) -> list[Row]:
    cpu, memory = machine.cpu, machine.memory
    limit = f", limited to {cpu.quota:g} cores by a quota" if cpu.quota else ""
    caches = ", ".join(f"{level} {num_bytes >> 10:,} KiB" for level, num_bytes in cpu.cache_bytes.items())
    grouped = " (cgroup limit)" if memory.limit_bytes else ""
    rows = [
        ("cpu", cpu.name),
        ("cores", f"{cpu.usable_cores} usable of {cpu.physical_cores} physical, {cpu.logical_cores} logical{limit}"),
        ("instructions", " ".join(cpu.instruction_sets) or "none detected"),
        ("kernels", is_available()[1]),
        ("caches", caches or "unknown"),
        ("memory", f"{size(memory.available_bytes)} available of {size(memory.total_bytes)}{grouped}"),
    ]
    for gpu in machine.gpus:
        peaks = find_device(gpu.name)
        speed = (
            f", {size(peaks.bandwidth_bytes_s)}/s, {peaks.flops_for('bf16') / 1e12:.0f} TFLOP/s bf16" if peaks else ""
        )
        rows.append((f"gpu {gpu.index}", f"{gpu.name}, {gpu.architecture}, {size(gpu.free_bytes)} free{speed}"))
    return rows if machine.gpus else [*rows, ("gpu", "none")]


def package_rows() -> list[Row]:
    rows = [(name, _version(name) or "not installed") for name in PACKAGES]
    driver = driver_version()
    return [*rows, ("NVIDIA driver", driver)] if driver else rows


def store_rows(store: Store, manifests: list[Manifest]) -> list[Row]:
    rows = [("where", str(store.root)), ("size", size(store.size_bytes()))]
    if store.partial_bytes():
        rows.append(("unfinished", f"{size(store.partial_bytes())} of downloads that can be resumed"))
    return rows + [(manifest.name, f"{size(manifest.size_bytes)}, {manifest.source}") for manifest in manifests]


def choice_rows(store: Store, manifests: list[Manifest]) -> tuple[list[Row], str | None]:
    """Return the settings that the engine would choose for the default model or the first stored one, or why it can't
    run it."""
    if not manifests:
        return [("", f"no model yet: `tokenmill pull` downloads {DEFAULT_MODEL}")], None
    manifest = next((m for m in manifests if m.name == DEFAULT_MODEL), manifests[0])
    try:
        reasons = _reasons(store, manifest)
    except TokenmillError as problem:
        return [(manifest.name, "nothing: see below")], f"{manifest.name} can't be run: {problem}"
    return [(manifest.name if not index else "", reason) for index, reason in enumerate(reasons)], None


def _reasons(store: Store, manifest: Manifest) -> list[str]:
    path = store.path_of(manifest)
    return explain_choices(EngineConfig(ModelConfig(model=manifest.name)), path, read_spec(path))


def to_fix(machine: Machine, store: Store, manifests: list[Manifest]) -> tuple[list[str], list[str]]:
    """Return problems that must be fixed, and improvements."""
    damaged = sorted(set(store.names()) - {manifest.name for manifest in manifests})
    must = [f"{name} is damaged: tokenmill rm {name}, then tokenmill pull {name}" for name in damaged]
    if _version("torch") is None:
        must.append("torch is not installed: pip install torch")
    if not _is_writable(store):
        must.append(f"the model store {store.root} is not writable: set TOKENMILL_HOME")
    has_kernels, why_not = is_available()
    advice: list[tuple[bool, Callable[[], str]]] = [
        (not has_kernels, lambda: f"{why_not}: models on CPUs run on torch, which is many times slower"),
        (not manifests, lambda: f"no model yet: tokenmill pull downloads {DEFAULT_MODEL} (98 MB)"),
        (machine.memory.available_bytes < LOW_MEMORY_BYTES, lambda: "less than 2 GiB of memory available"),
        (_free_disk(store) < LOW_DISK_BYTES, lambda: f"only {size(_free_disk(store))} free on the store's disk"),
        (bool(machine.gpus), lambda: gpu_advice(machine.gpus[0])),
        (
            bool(machine.gpus) and importlib.util.find_spec("triton") is None,
            lambda: "GPU kernels need triton: pip install triton",
        ),
        (not _is_there("pip"), lambda: "pip is missing: models can't be downloaded from PyPI"),
    ]
    return must, [told for applies, text in advice if applies and (told := text())]


def gpu_advice(gpu: Gpu) -> str:
    """Return advice on a GPU that torch can't use; empty if it can."""
    if _version("torch") is None:
        return ""
    return unused_gpu(gpu) or ""


def _is_writable(store: Store) -> bool:
    try:
        store.prepare()
    except TokenmillError:
        return False
    return True


def _free_disk(store: Store) -> int:
    return shutil.disk_usage(nearest_existing(store.root)).free


def _is_there(module: str) -> bool:
    """Return whether a module can be imported, whatever package provides it."""
    return importlib.util.find_spec(module) is not None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _section(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    print_facts([(f"  {label}", text) for label, text in rows])
