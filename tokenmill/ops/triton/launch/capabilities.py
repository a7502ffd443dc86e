"""Capabilities of a GPU, and the measured thresholds by which kernels are chosen for it.

fp8       NVIDIA from Ada (8.9) on multiplies e4m3 numbers. AMD's matrix units, where they have fp8 at all, mean another
          encoding by it (fnuz).
Hopper    copies tiles by a unit of its own (TMA) and multiplies them from shared memory (wgmma): Gluon kernels.
tuning    row limits and numbers of programs, one row per GPU in `tuning.toml`; rows that `tokenmill tune` measured on
          this machine (`$TOKENMILL_HOME/tuning.toml`) come first.

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

GLUON_SINCE = (3, 6)  # Triton's version in which Gluon has what our Hopper kernels use
HOPPER = 9  # major compute capability
SCALED_BLOCKS_SINCE = (12, 9)  # CUDA's version in which cuBLAS multiplies fp8 by scales of blocks, on Hopper
TUNED = "H200"  # the row for devices that are no GPU: kernels in Triton's interpreter
COMPUTE_CAPABILITIES = {
    "V100": (7, 0), "T4": (7, 5), "A10": (8, 6), "A40": (8, 6), "RTX 3090": (8, 6), "L40S": (8, 9), "H100": (9, 0),
    "H20": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0),
}  # fmt: skip
"""GPUs without a row of their own that can be asked about by name"""


class Tuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of one GPU by which kernels are chosen.

    `*_max_rows`, `*_min_rows`: up to, or from which number of activation rows on a kernel is faster than the next one.
    `*_programs`: so many programs keep the GPU busy; a matrix or a context is split until there are as many."""

    name: str  # part of the name that the driver reports
    compute_capability: tuple[int, int]
    multiprocessors: int
    source: str  # "measured", or "derived from ..."
    note: str = ""

    gemm_splitk_max_rows: int
    gemm_splitk_programs: int
    gemm_hopper_max_rows: int  # of captured steps
    gemm_hopper_min_chunks: int  # of 128 bytes of a matrix row, for each part of a split
    gemm_gated_min_rows: int  # the gated product with its epilogue fused (Hopper)
    gemm_add_min_rows: int  # cuBLAS adds to the residual stream itself
    fp8_split_max_rows: int  # activations as two fp8 numbers each; more rows are rounded to one
    fp8_split_programs: int  # up to 16 rows; half of it above
    int4_gemv_programs: int
    int4_splitk_max_rows: int
    int4_splitk_programs: int
    int8_splitk_max_rows: int
    int8_splitk_programs: int
    int_hopper_max_rows: int
    table_hopper_max_rows: int = 2048  # codes of a table; in rows of older tuning files too
    moe_gemv_max_tokens: int  # each (token, expert) pair streams its expert's matrices; more are sorted by expert
    moe_gemv_programs: int
    moe_expand_min_pairs: int  # tokens an expert from which on packed experts are expanded before the product
    attention_decode_programs: int
    attention_fused_min_splits: int  # of contexts, for cache write and attention in one kernel
    attention_dense_min_tokens: int  # of whole prompts, for torch's attention


@dataclass(frozen=True, eq=False)  # compared by identity: one for each device, looked up for every product
class Capabilities:
    """The properties of a GPU that kernel selection uses."""

    device: str
    compute_capability: tuple[int, int]
    is_hopper: bool
    has_gluon: bool
    tuning: Tuning
    origin: str  # where the tuning comes from, for people
    has_scaled_blocks: bool = False  # cuBLAS multiplies fp8 numbers with scales of 128 x 128


@cache
def built_in_tunings() -> tuple[Tuning, ...]:
    return _read_rows(files("tokenmill.ops.triton").joinpath("tuning.toml").read_text(encoding="utf-8"))


def measured_tunings(path: Path) -> tuple[Tuning, ...]:
    """The rows that `tokenmill tune` wrote into `path`; none where there is no such file."""
    try:
        return _read_rows(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as problem:
        raise InvalidConfig(f"{path} is no table of GPUs: {problem}", hint="remove it, or run tokenmill tune") from None


def _read_rows(text: str) -> tuple[Tuning, ...]:
    return tuple(msgspec.convert(tomllib.loads(text)["gpu"], tuple[Tuning, ...]))


def find_tuning(
    name: str, compute_capability: tuple[int, int], rows: tuple[Tuning, ...] | None = None
) -> tuple[Tuning, str]:
    """The row of a GPU, and where it comes from: its own, or that of the nearest compute capability."""
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
    """The capabilities of an NVIDIA GPU, which need not be here."""
    tuning, origin = find_tuning(name, compute_capability, rows)
    is_hopper = compute_capability[0] == HOPPER
    has_gluon = is_hopper and _triton_version() >= GLUON_SINCE
    return Capabilities(name, compute_capability, is_hopper, has_gluon, tuning, origin, has_scaled_blocks=is_hopper)


def named_gpu(name: str) -> Capabilities:
    """The capabilities of a GPU by its name: one that has a row, or whose compute capability is known."""
    known = {row.name: row.compute_capability for row in built_in_tunings()} | COMPUTE_CAPABILITIES
    for own, capability in known.items():
        if _plain(own) == _plain(name):
            return describe_gpu(own, capability)
    raise InvalidConfig(f"there is no GPU called {name!r} here", hint=f"known GPUs: {', '.join(known)}")


_of_devices: dict[torch.device, Capabilities] = {}


def capabilities_of(device: torch.device) -> Capabilities:
    """The capabilities of a device at hand, probed once"""
    found = _of_devices.get(device)
    if found is None:
        found = _of_devices[device] = probe_capabilities(device)
    return found


@contextmanager
def assume_capabilities(capabilities: Capabilities) -> Iterator[None]:
    """Let kernels be chosen by other numbers than the GPU's own, for `tokenmill tune`, which measures one after the
    other."""
    before = dict(_of_devices)
    _of_devices.update(dict.fromkeys(before, capabilities))
    try:
        yield
    finally:
        _of_devices.update(before)


def probe_capabilities(device: torch.device) -> Capabilities:
    """Return the capabilities of a device. Where it is no GPU, kernels run in Triton's interpreter: they are chosen as
    for an H200, without what only its hardware has."""
    if device.type != "cuda" or not torch.cuda.is_available():
        row = next(row for row in built_in_tunings() if row.name == TUNED)
        return Capabilities(str(device), row.compute_capability, False, False, row, f"{row.name}: interpreted")
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    found = describe_gpu(name, capability, known_tunings())
    if torch.version.hip is not None:  # AMD numbers its generations in the same way and means others
        return replace(found, is_hopper=False, has_gluon=False, has_scaled_blocks=False)
    version = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    return replace(found, has_scaled_blocks=found.is_hopper and version >= SCALED_BLOCKS_SINCE)


def known_tunings() -> tuple[Tuning, ...]:
    """Return all tuning rows, those that were measured on this machine first"""
    return *measured_tunings(tuning_path()), *built_in_tunings()


def tuning_path() -> Path:
    """Return the path to which `tokenmill tune` writes its measurements."""
    from tokenmill.store.layout import store_root

    return store_root() / "tuning.toml"


def _triton_version() -> tuple[int, ...]:
    """The installed Triton's; where there is none, choices are shown as a recent one would make them."""
    if find_spec("triton") is None:
        return GLUON_SINCE
    import triton  # half a second, which only those wait for who ask about a Hopper GPU

    return tuple(map(int, triton.__version__.split(".")[:2]))


@cache
def has_fp8(device: torch.device) -> bool:
    """Return whether the device multiplies fp8 numbers; the interpreter does."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def keeps_fp4(gpu: Capabilities, dtype: torch.dtype) -> bool:
    """Return whether matrices of 4-bit floats, or of codes of a table, are multiplied as they are, other than those of
    experts. Only Hopper's kernel expands them about as fast as it reads them; the plain Triton one takes three times as
    long as 8-bit integers."""
    return gpu.has_gluon and dtype == torch.bfloat16


def keeps_fp4_on(device: torch.device, dtype: torch.dtype) -> bool:
    """The same of a device at hand; the interpreter keeps them."""
    return device.type != "cuda" or not torch.cuda.is_available() or keeps_fp4(capabilities_of(device), dtype)
