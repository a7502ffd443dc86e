"""`tokenmill plan`: memory, speed and price of a model on a device, before buying it. No weights, no torch."""

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
    """Name from the table (--devices lists it), or auto for this machine by measurement; several by commas."""
    tp: Count = 1
    """Devices that share every layer (tensor split)."""
    pp: Count = 1
    """Stages that the layers are cut into (pipeline split)."""
    link: str | None = None
    """What connects several devices: nvlink, pcie5, pcie4, ib, ethernet, shared or loopback; by default what such
    devices usually have."""
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
        from tokenmill.planner.links import find_link

        device = plan_device(name, mfu=self.mfu, mbu=self.mbu)
        return device if self.link is None else replace(device, linked_by=find_link(self.link))


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
    mtp: Annotated[bool, Parameter(negative="")] = False
    """Count the head that predicts further tokens, as `serve --speculate mtp` reads it."""


@dataclass(frozen=True)
class ShowConfig:
    compare: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = ()
    """More devices or models to show side by side."""
    fit: Annotated[bool, Parameter(negative="")] = False
    """Show every precision and split on the device."""
    topologies: Count | None = None
    """Rank all ways to put the model on this many devices: tensor splits, pipelines, replicas."""
    which: Annotated[bool, Parameter(negative="")] = False
    """Rank all known devices by the price of a request within the limits, 1 to 8 of each side by side."""
    devices: Annotated[bool, Parameter(negative="")] = False
    """List the known devices and nothing else."""
    json: Annotated[bool, Parameter(negative="")] = False
    """One JSON object for programs."""
    html: Path | None = None
    """Write a page with plots to this file."""
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative="")] = False
    """All figures: operations, memory by part, and who can read that fast."""


DeviceFlags = Annotated[DeviceConfig, Parameter(name="*", group=Group.create_ordered("Where it runs"))]
LoadFlags = Annotated[LoadConfig, Parameter(name="*", group=Group.create_ordered("What it must carry"))]
PrecisionFlags = Annotated[PrecisionConfig, Parameter(name="*", group=Group.create_ordered("How it is stored"))]
ShowFlags = Annotated[ShowConfig, Parameter(name="*", group=Group.create_ordered("What is shown"))]
DEVICE, LOAD, PRECISION, SHOW = DeviceConfig(), LoadConfig(), PrecisionConfig(), ShowConfig()


def require_no_idle(device: DeviceConfig, precision: PrecisionConfig, show: ShowConfig) -> None:
    """Refuse flags that --calibrate measures, and flags that --fit tries in every way."""
    refuse_idle(device, dict.fromkeys(("mfu", "mbu"), (device.calibrate is None, "a plan without --calibrate")))
    ranked = ("tp", "pp", "link", "mfu", "mbu", "calibrate", "usd_per_hour")
    refuse_idle(device, dict.fromkeys(ranked, (not show.which, "a plan without --which, which asks the table")))
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
            raise InvalidConfig(f"{name!r} is no limit of a plan; write ttft=1s,tpot=100ms", param="slo")
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
    """What a model takes and gives on a device: memory, TTFT, TPOT, concurrency, price.

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
        raise InvalidConfig(f"{model} fits {device.device} in no precision and on no split of it", hint="--which")
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
            raise InvalidConfig(f"no {what} is named", param=what)
    found = [find_model(name) for name in model_names]
    if asked.calibrate is not None:
        if len(found) > 1 or len(device_names) > 1:
            raise InvalidConfig("--calibrate is about one model on one device", param="calibrate")
        question = replace(question, speeds=measured_speeds(asked.calibrate, found[0], question.kv_dtype))
    pairs = list(product(found, [asked.named(name) for name in device_names]))
    if show.fit:
        return [plan for pair in pairs for plan in grid(*pair, question)]
    return [make_plan(model, device, question) for model, device in pairs]


def measured_speeds(path: Path, model: PlannedModel, kv_dtype: str) -> Speeds:
    """Read the speeds of a benchmark result: of the engine alone, or of a server of `model` under load."""
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
        print("\nWhich TPOT a reader needs:")
        print_table(
            ("a reader who", "words/min", "ms/token", "kept up"), [tuple(r) for r in reading_rows(plans[0].tpot_s)]
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
