"""The flags of `tokenmill plan`, in groups, and the question they become."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from tokenmill.cli.amounts import AmountOrZero, Count, Share
from tokenmill.cli.checks import refuse_idle
from tokenmill.errors import InvalidConfig

if TYPE_CHECKING:
    from tokenmill.planner.capacity import Slo
    from tokenmill.planner.device import PlanDevice
    from tokenmill.planner.plan import Question


@dataclass(frozen=True)
class DeviceConfig:
    device: str = "auto"
    """Name from the table (--devices lists it), or auto for this machine by measurement; several by commas."""
    tp: Count = 1
    """Devices that share every layer (tensor split)."""
    pp: Count = 1
    """Stages that the layers are cut into (pipeline split)."""
    mfu: Share | None = None
    """Share of peak arithmetic that prefill reaches."""
    mbu: Share | None = None
    """Share of peak bandwidth that decode reaches."""
    calibrate: Path | None = None
    """JSON result of `bench offline`, `latency` or `serve --output` on this device, instead of mfu and mbu."""
    usd_per_hour: AmountOrZero | None = None
    """Price of all devices together."""

    def named(self, name: str) -> PlanDevice:
        from tokenmill.planner.device import plan_device

        return plan_device(name, mfu=self.mfu, mbu=self.mbu)


@dataclass(frozen=True)
class LoadConfig:
    input_len: Count = 1024
    """Prompt tokens of a request."""
    output_len: Count = 1024
    """Answer tokens of a request."""
    batch: Count = 1
    """Requests running together for which TPOT is shown."""
    slo: str = ""
    """Limits to stay within: ttft=1s,tpot=100ms."""
    context: Count | None = None
    """Tokens kept per request; input plus output by default."""
    max_running: Count = 256
    """Requests that may run together."""
    token_budget: Count = 2048
    """Tokens computed in one step at most."""


@dataclass(frozen=True)
class PrecisionConfig:
    weight_dtype: str = "auto"
    """float32, bfloat16, fp8, int8, int4 or a GGUF type such as Q4_K; auto: as stored."""
    kv_dtype: str = "auto"
    """Precision of cached keys and values; auto: what a GPU computes in, float16 on a CPU."""
    memory_fraction: Share | None = None
    """Share of the memory left after the weights that the KV pool takes."""


@dataclass(frozen=True)
class ShowConfig:
    compare: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = ()
    """More devices or models to show side by side."""
    fit: Annotated[bool, Parameter(negative="")] = False
    """Show every precision and split on the device."""
    devices: Annotated[bool, Parameter(negative="")] = False
    """List the known devices and nothing else."""
    json: Annotated[bool, Parameter(negative="")] = False
    """One JSON object for programs."""
    html: Path | None = None
    """Write a page with plots to this file."""


DeviceFlags = Annotated[DeviceConfig, Parameter(name="*", group=Group.create_ordered("Where it runs"))]
LoadFlags = Annotated[LoadConfig, Parameter(name="*", group=Group.create_ordered("What it must carry"))]
PrecisionFlags = Annotated[PrecisionConfig, Parameter(name="*", group=Group.create_ordered("How it is stored"))]
ShowFlags = Annotated[ShowConfig, Parameter(name="*", group=Group.create_ordered("What is shown"))]
DEVICE, LOAD, PRECISION, SHOW = DeviceConfig(), LoadConfig(), PrecisionConfig(), ShowConfig()


def require_no_idle(device: DeviceConfig, precision: PrecisionConfig, show: ShowConfig) -> None:
    """What a measurement tells, and what a grid tries in every way, can't be given beside it."""
    refuse_idle(device, dict.fromkeys(("mfu", "mbu"), (device.calibrate is None, "a plan without --calibrate")))
    for group, names in ((device, ("tp", "pp")), (precision, ("weight_dtype", "kv_dtype"))):
        refuse_idle(group, dict.fromkeys(names, (not show.fit, "a plan without --fit, which tries them all")))


def question(device: DeviceConfig, load: LoadConfig, precision: PrecisionConfig) -> Question:
    from tokenmill.planner.memory import Split
    from tokenmill.planner.plan import Question

    return Question(
        input_len=load.input_len,
        output_len=load.output_len,
        batch=load.batch,
        weight_dtype=precision.weight_dtype,
        kv_dtype=precision.kv_dtype,
        split=Split(device.tp, device.pp),
        max_context=load.context,
        max_running=load.max_running,
        token_budget=load.token_budget,
        memory_fraction=precision.memory_fraction,
        slo=parse_slo(load.slo),
        usd_per_hour=device.usd_per_hour,
    )


def parse_slo(text: str) -> Slo:
    from tokenmill.bench.slo import parse_seconds
    from tokenmill.planner.capacity import Slo

    limits: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        key = name.strip().split("_")[0]
        if key not in ("ttft", "tpot"):
            raise InvalidConfig(f"{name!r} is no limit of a plan; write ttft=1s,tpot=100ms", param="slo")
        limits[f"{key}_s"] = parse_seconds(value)
    return Slo(**limits)
