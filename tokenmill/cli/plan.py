"""`tokenmill plan`: memory, speed and price of a model on a device, before buying it. No weights, no torch."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tokenmill.cli.screen import print_facts, print_table
from tokenmill.cli.tables import print_json_line
from tokenmill.errors import InvalidConfig
from tokenmill.store import DEFAULT_MODEL


def command(
    model: str = DEFAULT_MODEL,
    /,
    *,
    device: str = "auto",
    tp: int = 1,
    pp: int = 1,
    weight_dtype: str = "auto",
    kv_dtype: str = "auto",
    input_len: int = 1024,
    output_len: int = 1024,
    batch: int = 1,
    context: int | None = None,
    max_running: int = 256,
    token_budget: int = 2048,
    memory_fraction: float | None = None,
    slo: str = "",
    mfu: float | None = None,
    mbu: float | None = None,
    usd_per_hour: float | None = None,
    calibrate: Path | None = None,
    compare: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = (),
    fit: Annotated[bool, Parameter(negative="")] = False,
    devices: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
    html: Path | None = None,
) -> int:
    """What a model takes and gives on a device: memory, TTFT, TPOT, concurrency, price.

    Parameters
    ----------
    model
        config.json, model directory, GGUF file or short name; several separated by commas.
    device
        Name from the table (--devices lists it), or auto for this machine by measurement; several by commas.
    tp
        Devices that share every layer (tensor split).
    pp
        Stages that the layers are cut into (pipeline split).
    weight_dtype
        float32, bfloat16, fp8, int8, int4 or a GGUF type such as Q4_K; auto: as stored.
    kv_dtype
        Precision of cached keys and values; auto: bfloat16, float16 on a CPU.
    input_len
        Prompt tokens of a request.
    output_len
        Answer tokens of a request.
    batch
        Requests running together for which TPOT is shown.
    context
        Tokens kept per request; input plus output by default.
    max_running
        Requests that may run together.
    token_budget
        Tokens computed in one step at most.
    memory_fraction
        Share of the memory left after the weights that the KV pool takes.
    slo
        Limits to stay within: ttft=1s,tpot=100ms.
    mfu
        Share of peak arithmetic that prefill reaches.
    mbu
        Share of peak bandwidth that decode reaches.
    usd_per_hour
        Price of all devices together.
    calibrate
        JSON result of `bench offline` on this device, instead of mfu and mbu.
    compare
        More devices or models to show side by side.
    fit
        Show every precision and split on the device.
    devices
        List the known devices and nothing else.
    json
        One JSON object for programs.
    html
        Write a page with plots to this file.
    """
    if devices:
        _list_devices()
        return 0
    from tokenmill.planner.calibrate import read_calibration
    from tokenmill.planner.memory import Split
    from tokenmill.planner.plan import Question

    question = Question(
        input_len=_positive(input_len, "input-len"),
        output_len=_positive(output_len, "output-len"),
        batch=_positive(batch, "batch"),
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        split=Split(tp, pp),
        max_context=context,
        max_running=_positive(max_running, "max-running"),
        token_budget=_positive(token_budget, "token-budget"),
        memory_fraction=memory_fraction,
        slo=parse_slo(slo),
        usd_per_hour=usd_per_hour,
        speeds=read_calibration(calibrate) if calibrate else None,
    )
    plans = _plans(model, device, compare, question, mfu=mfu, mbu=mbu, fit=fit)
    _print(plans, as_json=json)
    if html is not None:
        from tokenmill.planner.report import html_page

        html.write_text(html_page(plans), encoding="utf-8")
    return 0


def _positive(value: int, name: str) -> int:
    if value < 1:
        raise InvalidConfig(f"--{name} must be at least 1, not {value}", param=name)
    return value


def parse_slo(text: str) -> Any:
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


def _plans(
    models: str, devices: str, more: tuple[str, ...], question: Any, *, mfu: float | None, mbu: float | None, fit: bool
) -> list[Any]:
    from tokenmill.hardware.peaks import find_device
    from tokenmill.planner.device import plan_device
    from tokenmill.planner.fit import grid
    from tokenmill.planner.model import find_model
    from tokenmill.planner.plan import make_plan

    others = [name.strip() for part in more for name in part.split(",") if name.strip()]
    device_names = [*_list(devices), *[name for name in others if name == "auto" or find_device(name)]]
    model_names = [*_list(models), *[name for name in others if name != "auto" and not find_device(name)]]
    pairs = list(
        product([find_model(name) for name in model_names], [plan_device(n, mfu=mfu, mbu=mbu) for n in device_names])
    )
    if fit:
        return [plan for pair in pairs for plan in grid(*pair, question)]
    return [make_plan(model, device, question) for model, device in pairs]


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _print(plans: list[Any], *, as_json: bool) -> None:
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
