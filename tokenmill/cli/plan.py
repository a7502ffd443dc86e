"""`tokenmill plan`: memory, speed and price of a model on a device, before buying it. No weights, no torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.cli import plan_flags
from tokenmill.cli.checks import require_folder
from tokenmill.cli.plan_flags import DeviceConfig, ShowConfig
from tokenmill.cli.screen import print_facts, print_table
from tokenmill.cli.tables import print_json_line
from tokenmill.errors import InvalidConfig
from tokenmill.store import DEFAULT_MODEL

if TYPE_CHECKING:
    from tokenmill.planner.model import PlannedModel
    from tokenmill.planner.plan import Plan, Question
    from tokenmill.planner.roofline import Speeds


def command(
    model: str = DEFAULT_MODEL,
    /,
    *,
    device: plan_flags.DeviceFlags = plan_flags.DEVICE,
    load: plan_flags.LoadFlags = plan_flags.LOAD,
    precision: plan_flags.PrecisionFlags = plan_flags.PRECISION,
    show: plan_flags.ShowFlags = plan_flags.SHOW,
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
    require_folder(show.html, "html")
    plan_flags.require_no_idle(device, precision, show)
    plans = _plans(model, device, show, plan_flags.question(device, load, precision))
    _print(plans, as_json=show.json)
    if show.html is not None:
        from tokenmill.planner.report import html_page

        show.html.write_text(html_page(plans), encoding="utf-8")
    return 0


def _plans(models: str, asked: DeviceConfig, show: ShowConfig, question: Question) -> list[Plan]:
    from tokenmill.hardware.peaks import find_device
    from tokenmill.planner.fit import grid
    from tokenmill.planner.model import find_model
    from tokenmill.planner.plan import make_plan

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


def _print(plans: list[Plan], *, as_json: bool) -> None:
    from tokenmill.planner.report import comparison, facts, reading_rows

    if as_json:
        flats = [plan.flat() for plan in plans]
        print_json_line(flats[0] if len(flats) == 1 else {"plans": flats})
    elif len(plans) == 1:
        print_facts(facts(plans[0]))
        print("\nWhich TPOT a reader needs:")
        print_table(
            ("a reader who", "words/min", "ms/token", "kept up"), [tuple(r) for r in reading_rows(plans[0].tpot_s)]
        )
    else:
        titles, rows = comparison(plans)
        columns = [[titles[n], *[row[n] for row in rows]] for n in range(len(titles))]
        print_table(tuple(columns[0]), [tuple(column) for column in columns[1:]])


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
