"""Capabilities of a GPU, and the measured thresholds by which kernels are chosen for it.

fp8       NVIDIA GPUs from Ada (8.9) on multiply e4m3. AMD's matrix cores, if they have fp8 at all, use another encoding
          (fnuz).
Hopper    has a tile copy unit (TMA) and multiplies from shared memory (wgmma): Gluon kernels use both.
tuning    thresholds and numbers of programs, one row per GPU in `tuning.toml`; rows that `tokenmill tune` measured on
          this machine (`$TOKENMILL_HOME/tuning.toml`) take precedence.

Needs no Triton and no GPU: `tokenmill doctor --kernels --device A100` reads the same rows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import msgspec
import torch

from tokenmill.errors import InvalidConfig

GLUON_SINCE = (3, 6)  # first Triton version whose Gluon supports our Hopper kernels
HOPPER = 9  # major compute capability
SCALED_BLOCKS_SINCE = (12, 9)  # first CUDA version whose cuBLAS supports fp8 with block scales on Hopper
TUNED = "H200"  # the row that is used without a GPU, in Triton's interpreter
COMPUTE_CAPABILITIES = {
    "V100": (7, 0), "T4": (7, 5), "A10": (8, 6), "A40": (8, 6), "RTX 3090": (8, 6), "L40S": (8, 9), "H100": (9, 0),
    "H20": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0),
}  # fmt: skip
"""Compute capabilities of GPUs without a row of their own, for look-up by name"""


class Tuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The thresholds of one GPU by which kernels are chosen.

    `*_max_rows`, `*_min_rows`: up to, or from, this many activation rows a kernel is faster than the next one.
    `*_programs`: the number of programs that fills the GPU; matrices or contexts are split to reach it."""

    name: str  # a part of the name that the driver reports
    compute_capability: tuple[int, int]
    multiprocessors: int
    source: str  # "measured", or "derived from ..."
    note: str = ""

    gemm_splitk_max_rows: int
    gemm_splitk_programs: int
    gemm_hopper_max_rows: int  # in captured steps
    gemm_hopper_min_chunks: int  # of 128 bytes of a matrix row, per split
    gemm_gated_min_rows: int  # the gated product with its epilogue fused (Hopper)
    gemm_add_min_rows: int  # cuBLAS adds the residual stream itself
    fp8_split_max_rows: int  # activations are two fp8 values each; with more rows, one
    fp8_split_programs: int  # up to 16 rows; half of that above
    int4_gemv_programs: int
    int4_splitk_max_rows: int
    int4_splitk_programs: int
    int8_splitk_max_rows: int
    int8_splitk_programs: int
    int_hopper_max_rows: int
    table_hopper_max_rows: int = 2048  # table codes; missing in older tuning files
    moe_gemv_max_tokens: (
        int  # each (token, expert) pair streams its expert's matrices; more tokens are sorted by expert
    )
    moe_gemv_programs: int
    moe_expand_min_pairs: int  # tokens per expert from which on packed experts are expanded before the product
    attention_decode_programs: int
    attention_fused_min_splits: int  # of contexts, for cache write and attention in one kernel
    attention_dense_min_tokens: int  # of whole prompts, for torch's attention


@dataclass(frozen=True, eq=False)  # compared by identity: one per device, part of the key of every cached choice
class Capabilities:
    """The properties of a GPU that kernel selection uses."""

    device: str
    compute_capability: tuple[int, int]
    is_hopper: bool
    has_gluon: bool
    tuning: Tuning
    origin: str  # source of the tuning, for display
    has_scaled_blocks: bool = False  # cuBLAS supports fp8 with scales of 128 x 128 blocks


@cache
def built_in_tunings() -> tuple[Tuning, ...]:
    return _read_rows(files("tokenmill.ops.triton").joinpath("tuning.toml").read_text(encoding="utf-8"))


def measured_tunings(path: Path) -> tuple[Tuning, ...]:
    """Return the rows that `tokenmill tune` wrote to `path`; none if the file does not exist."""
    try:
        return _read_rows(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (ValueError, KeyError, msgspec.ValidationError) as problem:
        raise InvalidConfig(
            f"{path}: not a valid tuning file: {problem}", hint="remove it, or run tokenmill tune"
        ) from None


def _read_rows(text: str) -> tuple[Tuning, ...]:
    return tuple(msgspec.convert(tomllib.loads(text)["gpu"], tuple[Tuning, ...]))


def find_tuning(
    name: str, compute_capability: tuple[int, int], rows: tuple[Tuning, ...] | None = None
) -> tuple[Tuning, str]:
    """Return the row of a GPU and its source: the GPU's own row, or that of the nearest compute capability."""
    rows = built_in_tunings() if rows is None else rows
    for row in rows:
        if _plain(row.name) in _plain(name) and row.compute_capability == compute_capability:
            return row, f"{row.name}: {row.source}"
    nearest = min(rows, key=lambda row: _distance(row.compute_capability, compute_capability))
    found = ".".join(map(str, compute_capability))
    return nearest, f"no row for {name} ({found}): that of {nearest.name}, the nearest compute capability"


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "")


def _distance(one: tuple[int, int], other: tuple[int, int]) -> int:
    return abs(10 * one[0] + one[1] - 10 * other[0] - other[1])


def describe_gpu(
    name: str, compute_capability: tuple[int, int], rows: tuple[Tuning, ...] | None = None
) -> Capabilities:
    """Return the capabilities of an NVIDIA GPU that need not be present."""
    tuning, origin = find_tuning(name, compute_capability, rows)
    is_hopper = compute_capability[0] == HOPPER
    has_gluon = is_hopper and _triton_version() >= GLUON_SINCE
    return Capabilities(name, compute_capability, is_hopper, has_gluon, tuning, origin, has_scaled_blocks=is_hopper)


def named_gpu(name: str) -> Capabilities:
    """Return the capabilities of a GPU by name: one with a row, or with a known compute capability."""
    known = {row.name: row.compute_capability for row in built_in_tunings()} | COMPUTE_CAPABILITIES
    for own, capability in known.items():
        if _plain(own) == _plain(name):
            return describe_gpu(own, capability)
    raise InvalidConfig(f"unknown GPU {name!r}", hint=f"known GPUs: {', '.join(known)}")


_of_devices: dict[torch.device, Capabilities] = {}


def capabilities_of(device: torch.device) -> Capabilities:
    """Return the capabilities of a present device, probed once."""
    found = _of_devices.get(device)
    if found is None:
        found = _of_devices[device] = probe_capabilities(device)
    return found


@contextmanager
def assume_capabilities(capabilities: Capabilities) -> Iterator[None]:
    """Override the GPU's thresholds within a block, for the measurements of `tokenmill tune`."""
    before = dict(_of_devices)
    _of_devices.update(dict.fromkeys(before, capabilities))
    try:
        yield
    finally:
        _of_devices.update(before)


def probe_capabilities(device: torch.device) -> Capabilities:
    """Return the capabilities of a device. Without a GPU, kernels run in Triton's interpreter: they are chosen as for
    an H200, except those that need its hardware."""
    if device.type != "cuda" or not torch.cuda.is_available():
        row = next(row for row in built_in_tunings() if row.name == TUNED)
        return Capabilities(str(device), row.compute_capability, False, False, row, f"{row.name}: interpreted")
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    found = describe_gpu(name, capability, known_tunings())
    if torch.version.hip is not None:  # AMD's capability numbers look alike but have another meaning
        return replace(found, is_hopper=False, has_gluon=False, has_scaled_blocks=False)
    version = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    return replace(found, has_scaled_blocks=found.is_hopper and version >= SCALED_BLOCKS_SINCE)


def known_tunings() -> tuple[Tuning, ...]:
    """Return all tuning rows, those measured on this machine first."""
    return *measured_tunings(tuning_path()), *built_in_tunings()


def tuning_path() -> Path:
    """Return the path to which `tokenmill tune` writes its measurements."""
    from tokenmill.store.layout import store_root

    return store_root() / "tuning.toml"


def _triton_version() -> tuple[int, ...]:
    """Return the version of the installed Triton, or a recent one if it is missing, to describe choices."""
    if find_spec("triton") is None:
        return GLUON_SINCE
    import triton  # takes half a second, and is needed for Hopper GPUs only

    return tuple(map(int, triton.__version__.split(".")[:2]))


@cache
def has_fp8(device: torch.device) -> bool:
    """Return whether the device multiplies fp8 numbers; the interpreter does."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def keeps_fp4(gpu: Capabilities, dtype: torch.dtype) -> bool:
    """Return whether matrices of 4-bit floats or table codes, other than experts', are kept packed. Only the Hopper
    kernel expands them about as fast as it reads them; the plain Triton kernel takes three times as long as 8-bit
    integers."""
    return gpu.has_gluon and dtype == torch.bfloat16


def keeps_fp4_on(device: torch.device, dtype: torch.dtype) -> bool:
    """The same for a present device; the interpreter keeps them."""
    return device.type != "cuda" or not torch.cuda.is_available() or keeps_fp4(capabilities_of(device), dtype)
