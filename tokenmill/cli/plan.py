"""`tokenmill plan`: predict memory, speed and price of a model on a device. Needs neither weights nor torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from tokenmill.cli.flags import AmountOrZero, Count, Share, refuse_idle, require_page
from tokenmill.cli.output import print_facts, print_json_line, print_table
from tokenmill.errors import InvalidConfig
from tokenmill.store import DEFAULT_MODEL

if TYPE_CHECKING:
    from tokenmill.planner.capacity import Slo
    from tokenmill.planner.device import PlanDevice
    from tokenmill.planner.model import PlannedModel
    from tokenmill.planner.plan import Plan, Question
    from tokenmill.planner.roofline import Speeds


# ── flags ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class DeviceConfig:
    device: str = "auto"
    """Device from the table (see --devices), or auto to measure this machine; several separated by commas."""
    tp: Count = 1
    """Tensor parallel devices."""
    pp: Count = 1
    """Pipeline parallel stages."""
    link: str | None = None
    """Interconnect of the devices: nvlink, pcie5, pcie4, ib, ethernet, shared, loopback, or a result file of `bench
    links`; by default the usual one of such devices."""
    mfu: Share | None = None
    """Share of peak FLOP/s that prefill reaches (MFU)."""
    mbu: Share | None = None
    """Share of peak bandwidth that decode reaches (MBU)."""
    calibrate: Path | None = None
    """Result file of `bench offline`, `latency` or `serve --output` on this device, instead of --mfu and --mbu."""
    usd_per_hour: AmountOrZero | None = None
    """Price of all devices together per hour."""

    def named(self, name: str) -> PlanDevice:
        from tokenmill.planner.device import plan_device
        from tokenmill.planner.links import find_link

        device = plan_device(name, mfu=self.mfu, mbu=self.mbu)
        return device if self.link is None else replace(device, linked_by=find_link(self.link))


@dataclass(frozen=True)
class LoadConfig:
    input_len: Count = 1024
    """Prompt tokens per request."""
    output_len: Count = 1024
    """Answer tokens per request."""
    batch: Count = 1
    """Number of running requests for which TPOT is shown."""
    slo: str = ""
    """Latency limits: ttft=1s,tpot=100ms."""
    context: Count | None = None
    """Context length per request in tokens; by default input plus output."""
    max_running: Count = 256
    """Maximum number of running requests."""
    token_budget: Count = 2048
    """Maximum tokens per step."""


@dataclass(frozen=True)
class PrecisionConfig:
    weight_dtype: str = "auto"
    """Data type of weights: float32, bfloat16, fp8, int8, int4 or a GGUF type such as Q4_K; auto: as stored."""
    kv_dtype: str = "auto"
    """Data type of the KV cache; auto: the data type of activations on a GPU, float16 on a CPU."""
    memory_fraction: Share | None = None
    """Share of the memory left after the weights for the KV cache."""
    mtp: Annotated[bool, Parameter(negative="")] = False
    """Include the multi-token prediction head, which `serve --speculate mtp` loads."""


@dataclass(frozen=True)
class ShowConfig:
    compare: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = ()
    """Further devices or models to compare."""
    fit: Annotated[bool, Parameter(negative="")] = False
    """Try every precision and split on the device."""
    topologies: Count | None = None
    """Rank all ways to use this many devices: tensor parallel, pipelines, replicas."""
    which: Annotated[bool, Parameter(negative="")] = False
    """Rank all known devices, 1 to 8 of each, by the price of a request that meets the latency limits."""
    devices: Annotated[bool, Parameter(negative="")] = False
    """List the known devices."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print one JSON object."""
    html: Path | None = None
    """Write a page with charts to this file."""
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative="")] = False
    """Show all figures: operations, memory by part, and reading speeds for comparison."""


DeviceFlags = Annotated[DeviceConfig, Parameter(name="*", group=Group.create_ordered("Devices"))]
LoadFlags = Annotated[LoadConfig, Parameter(name="*", group=Group.create_ordered("Load"))]
PrecisionFlags = Annotated[PrecisionConfig, Parameter(name="*", group=Group.create_ordered("Precision"))]
ShowFlags = Annotated[ShowConfig, Parameter(name="*", group=Group.create_ordered("Output"))]
DEVICE, LOAD, PRECISION, SHOW = DeviceConfig(), LoadConfig(), PrecisionConfig(), ShowConfig()


def require_no_idle(device: DeviceConfig, precision: PrecisionConfig, show: ShowConfig) -> None:
    """Refuse flags that --calibrate measures, and flags whose values --fit, --which or --topologies enumerate."""
    refuse_idle(device, dict.fromkeys(("mfu", "mbu"), (device.calibrate is None, "a plan without --calibrate")))
    ranked = ("tp", "pp", "link", "mfu", "mbu", "calibrate", "usd_per_hour")
    refuse_idle(device, dict.fromkeys(ranked, (not show.which, "a plan without --which, which uses the table")))
    refuse_idle(show, dict.fromkeys(("compare", "fit", "html"), (not show.which, "a plan without --which")))
    asked = show.topologies is None
    refuse_idle(device, dict.fromkeys(("tp", "pp"), (asked, "a plan without --topologies, which tries them all")))
    others = ("compare", "fit", "which", "html", "verbose")
    refuse_idle(show, dict.fromkeys(others, (asked, "a plan without --topologies")))
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
        has_mtp_head=precision.mtp,
        slo=parse_slo(load.slo),
        usd_per_hour=device.usd_per_hour,
    )


def parse_slo(text: str) -> Slo:
    from tokenmill.bench.totals import parse_seconds
    from tokenmill.planner.capacity import Slo

    limits: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        key = name.strip().split("_")[0]
        if key not in ("ttft", "tpot"):
            raise InvalidConfig(f"{name!r} is not a limit of a plan; write ttft=1s,tpot=100ms", param="slo")
        limits[f"{key}_s"] = parse_seconds(value)
    return Slo(**limits)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────


def command(
    model: str = DEFAULT_MODEL,
    /,
    *,
    device: DeviceFlags = DEVICE,
    load: LoadFlags = LOAD,
    precision: PrecisionFlags = PRECISION,
    show: ShowFlags = SHOW,
) -> int:
    """Predict memory, TTFT, TPOT, concurrency and price of a model on a device.

    Parameters
    ----------
    model
        config.json, model directory, GGUF file or short name; several separated by commas.
    """
    if show.devices:
        _list_devices()
        return 0
    require_page(show.html)
    require_no_idle(device, precision, show)
    if show.topologies is not None:
        _rank_splits(model, device, show, question(device, load, precision))
        return 0
    if show.which:
        _rank(model, device, show, question(device, load, precision))
        return 0
    plans = _plans(model, device, show, question(device, load, precision))
    if not plans:
        raise InvalidConfig(f"{model} does not fit {device.device} in any precision and split", hint="--which")
    _print(plans, show)
    if show.html is not None:
        from tokenmill.planner.report import html_page

        show.html.write_text(html_page(plans, sys.argv[1:]), encoding="utf-8")
    return 0


def _rank(model: str, asked: DeviceConfig, show: ShowConfig, question: Question) -> None:
    from tokenmill.planner.model import find_model
    from tokenmill.planner.which import TITLES, rank_devices, rows, verdict

    names = [] if asked.device == "auto" else _list(asked.device)
    options = rank_devices(find_model(model), question, names)
    if show.json:
        print_json_line(
            {"devices": [o.plan.flat() if o.plan else {"device": o.device, "why_not": o.why_not} for o in options]}
        )
        return
    print_table(TITLES, rows(options))
    print(f"\n{verdict(options)}")


def _rank_splits(model: str, asked: DeviceConfig, show: ShowConfig, question: Question) -> None:
    from tokenmill.planner.model import find_model
    from tokenmill.planner.splits import TITLES, rank_splits, table_rows, verdict

    assert show.topologies is not None
    planned = find_model(model)
    if asked.calibrate is not None:
        question = replace(question, speeds=measured_speeds(asked.calibrate, planned, question.kv_dtype))
    options = rank_splits(planned, asked.named(asked.device), question, show.topologies)
    if show.json:
        print_json_line({"topologies": [option.flat() for option in options]})
        return
    print_table(TITLES, table_rows(options))
    print(f"\n{verdict(options)}")


def _plans(models: str, asked: DeviceConfig, show: ShowConfig, question: Question) -> list[Plan]:
    from tokenmill.hardware.peaks import find_device
    from tokenmill.planner.model import find_model
    from tokenmill.planner.plan import grid, make_plan

    others = [name for part in show.compare for name in _list(part)]
    device_names = [*_list(asked.device), *[name for name in others if name == "auto" or find_device(name)]]
    model_names = [*_list(models), *[name for name in others if name != "auto" and not find_device(name)]]
    for named, what in ((model_names, "model"), (device_names, "device")):
        if not named:
            raise InvalidConfig(f"the list of {what}s is empty", param=what)
    found = [find_model(name) for name in model_names]
    if asked.calibrate is not None:
        if len(found) > 1 or len(device_names) > 1:
            raise InvalidConfig("--calibrate needs one model and one device", param="calibrate")
        question = replace(question, speeds=measured_speeds(asked.calibrate, found[0], question.kv_dtype))
    pairs = list(product(found, [asked.named(name) for name in device_names]))
    if show.fit:
        return [plan for pair in pairs for plan in grid(*pair, question)]
    return [make_plan(model, device, question) for model, device in pairs]


def measured_speeds(path: Path, model: PlannedModel, kv_dtype: str) -> Speeds:
    """Read the speeds from a benchmark result of the engine alone or of a server under load."""
    from tokenmill.arch.read import read_json
    from tokenmill.bench.result import read_result
    from tokenmill.planner.calibrate import Served, read_calibration, served_speeds

    if read_json(path).get("benchmark") != "serve":
        return read_calibration(path)
    _, records = read_result(path)
    served = [
        Served(r.input_tokens or r.asked_input, r.num_tokens, r.sent_s, r.times_s[0], r.times_s[-1])
        for r in records
        if r.is_ok
    ]
    return served_speeds(served, model, "bfloat16" if kv_dtype == "auto" else kv_dtype)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _print(plans: list[Plan], show: ShowConfig) -> None:
    from tokenmill.planner.report import brief_facts, compared_by_row, facts, fit_verdict, reading_rows, verdict

    if show.json:
        flats = [plan.flat() for plan in plans]
        print_json_line(flats[0] if len(flats) == 1 else {"plans": flats})
    elif len(plans) == 1:
        print(f"{verdict(plans[0])}\n")
        print_facts(facts(plans[0]) if show.verbose else brief_facts(plans[0]))
        if not show.verbose:
            return
        print("\nTPOT compared with reading speeds:")
        print_table(
            ("reader", "words/min", "ms/token", "fast enough"), [tuple(r) for r in reading_rows(plans[0].tpot_s)]
        )
    else:
        titles, rows = compared_by_row(plans)
        print_table(tuple(titles), [tuple(row) for row in rows])
        if show.fit:
            print(f"\n{fit_verdict(plans)}")


def _list_devices() -> None:
    from tokenmill.hardware.peaks import DEVICES

    rows = [
        (
            device.name,
            f"{device.memory_bytes / 2**30:.0f}",
            f"{device.bandwidth_bytes_s / 1e9:,.0f}",
            f"{device.flops_for('bf16') / 1e12:,.0f}",
            f"{device.price_usd_h:.2f}" if device.price_usd_h else "–",
        )
        for device in DEVICES
    ]
    print_table(("device", "GiB", "GB/s", "TFLOP/s bf16", "$/h"), rows)
