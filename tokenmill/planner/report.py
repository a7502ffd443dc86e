"""Reports of plans: rows of a table, and an HTML page with plots."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from tokenmill.planner.capacity import READERS, readers_kept_up_with
from tokenmill.planner.plan import Plan
from tokenmill.report.charts import Axis, Series, line_chart, stacked_bars
from tokenmill.report.page import Heading, charts, page, table, today
from tokenmill.report.units import counted, duration

GB = 1e9


def verdict(plan: Plan) -> str:
    """Return the conclusion in one sentence."""
    best, price, where = plan.best, plan.price, f"{_times(plan)}{plan.device.name}"
    if not plan.memory.fits:
        return f"No: {where} does not hold {plan.model.name}: {plan.why_not().removeprefix('does not fit: ')}."
    if best is None:
        speeds = f"alone, a request has a TTFT of {duration(plan.ttft_s)} and a TPOT of {duration(plan.tpot_s)}"
        return f"No: {plan.model.name} fits {where}, but misses the limits; {speeds}."
    cost = "" if price is None else f", at ${price.usd_per_million_output:.3g} per million output tokens"
    return (
        f"Yes: {where} holds {counted(best.concurrency, 'request')} at once, {best.output_tok_s:,.0f} output tokens/s, "
        f"the first after {duration(best.ttft_s)}, each further one after {duration(best.tpot_s)}{cost}."
    )


def _times(plan: Plan) -> str:
    count = plan.question.split.num_devices
    return f"{count} × " if count > 1 else ""


def facts(plan: Plan) -> list[tuple[str, str]]:
    """Return the facts of a plan as (name, value)."""
    f = plan.flat()
    active = f" ({f['params_active'] / GB:.2f} B active per token)" if f["params_active"] != f["params_total"] else ""
    return [
        ("model", f"{f['model']} ({f['family']})"),
        ("device", f"{f['num_devices']} × {f['device']}, {f['device_bytes'] / GB:.1f} GB each, {f['device_source']}"),
        ("parameters", f"{f['params_total'] / GB:.2f} B{active}"),
        ("weights", f"{f['weight_bytes'] / GB:.2f} GB in {f['weight_dtype']}"),
        ("KV cache", _kv(plan)),
        ("on one device", _parts(plan)),
        ("fits", "yes" if f["fits"] else "no"),
        ("prefill", f"{f['prefill_tflops']:.2f} TFLOPs for {f['input_len']:,} tokens{_quick(f, 'prefill_tflops')}"),
        ("decode", f"{f['decode_tflops_per_token']:.4f} TFLOPs a token{_quick(f, 'decode_tflops_per_token')}"),
        ("TTFT", f"{duration(f['ttft_s'])}, one request alone ({_reached(plan, 'prefill')})"),
        ("TPOT", f"{duration(f['tpot_s'])} with {f['batch']} running ({_reached(plan, 'decode')}){_readers(plan)}"),
        ("most at once", _most(plan)),
        ("price", _price(plan)),
        *[("!", warning) for warning in plan.warnings()],
    ]  # fmt: skip


BRIEF = ("model", "device", "weights", "KV cache", "fits", "TTFT", "TPOT", "most at once", "price", "!")


def brief_facts(plan: Plan) -> list[tuple[str, str]]:
    """The facts that decide; the others are behind `-v`."""
    return [(name, value) for name, value in facts(plan) if name in BRIEF]


def fit_verdict(plans: Sequence[Plan]) -> str:
    """The plan to take, in a sentence: the cheapest within the limits, or the fastest where there are no prices."""
    able = [plan for plan in plans if plan.best is not None]
    if not able:
        return "All of these miss the limits."
    priced = [(plan.price.usd_per_request, plan) for plan in able if plan.price is not None]
    cheapest = min(priced, key=lambda one: one[0])[1] if priced else None
    best = cheapest or max(able, key=lambda plan: plan.best.output_tok_s if plan.best else 0.0)
    return f"{'Cheapest' if cheapest else 'Fastest'}: {label(best)}. {verdict(best)}"


def _quick(flat: dict[str, Any], key: str) -> str:
    return f" (two operations a parameter: {flat[key + '_quick']:.4g})"


def _kv(plan: Plan) -> str:
    f = plan.flat()
    return (
        f"{f['kv_bytes_per_token'] / 1e3:.1f} kB a token in {f['kv_dtype']}, "
        f"{f['kv_bytes_per_request'] / 1e6:,.0f} MB for {plan.question.context:,} tokens"
    )


def _parts(plan: Plan) -> str:
    return " + ".join(f"{name} {size / GB:.2f}" for name, size in memory_parts(plan)) + " GB"


def memory_parts(plan: Plan) -> list[tuple[str, float]]:
    m = plan.memory
    return [
        ("weights", m.weights),
        ("activations", m.activations),
        ("runtime and graphs", m.runtime + m.graphs),
        ("KV pool", m.kv_pool),
        *([("adapter slots", m.adapters)] if m.adapters else []),
        *([("MTP head", m.mtp_head)] if m.mtp_head else []),
    ]


def _reached(plan: Plan, phase: str) -> str:
    if plan.question.speeds is not None:
        return "calibrated"
    return f"MFU {plan.device.mfu:.0%}" if phase == "prefill" else f"MBU {plan.device.mbu:.0%}"


def _readers(plan: Plan) -> str:
    who = readers_kept_up_with(plan.tpot_s)
    return f", fast enough for one who {who[-1]}" if who else ", slower than speech"


def _most(plan: Plan) -> str:
    best, held = plan.best, plan.memory.max_concurrency
    if best is None:
        return "none within the limits"
    return (
        f"{best.concurrency} requests, {best.requests_s:.2f} a second, {best.output_tok_s:,.0f} output tokens/s "
        f"(TTFT {duration(best.ttft_s)}, TPOT {duration(best.tpot_s)}); memory holds {held}"
    )


def _price(plan: Plan) -> str:
    p = plan.price
    if p is None:
        return "unknown (--usd-per-hour)"
    return (
        f"${p.usd_per_hour:.2f} an hour: ${p.usd_per_million_input:.3f} per million input tokens, "
        f"${p.usd_per_million_output:.3f} output, ${p.usd_per_request:.6f} a request"
    )


COMPARED: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("parameters, B", lambda f: f"{f['params_total'] / GB:.2f}"),
    ("weights, GB", lambda f: f"{f['weight_bytes'] / GB:.1f}"),
    ("KV kB a token", lambda f: f"{f['kv_bytes_per_token'] / 1e3:.1f}"),
    ("devices", lambda f: f"{f['num_devices']}"),
    ("fits", lambda f: "yes" if f["fits"] else "no"),
    ("TTFT", lambda f: duration(f["ttft_s"])),
    ("TPOT", lambda f: duration(f["tpot_s"])),
    ("most at once", lambda f: f"{f['max_concurrency']}"),
    ("requests/s", lambda f: f"{f['max_requests_s']:.2f}"),
    ("output tok/s", lambda f: f"{f['max_output_tok_s']:,.0f}"),
    ("$ / M output", lambda f: "–" if f["usd_per_million_output"] is None else f"{f['usd_per_million_output']:.3f}"),
)


def compared_by_row(plans: Sequence[Plan]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows: one plan per row, one figure per column."""
    rows = [
        [name, *[show(plan.flat()) for _, show in COMPARED]]
        for name, plan in zip(short_labels(plans), plans, strict=True)
    ]
    return ["", *[name for name, _ in COMPARED]], rows


def label(plan: Plan) -> str:
    kv = f", KV {plan.kv_dtype}" if plan.question.kv_dtype != "auto" else ""
    return f"{plan.model.name}, {_times(plan)}{plan.device.name}, {plan.weight_dtype}{kv}"


def short_labels(plans: Sequence[Plan]) -> list[str]:
    """Return short labels of plans: the parts of their labels that differ; the device where none does."""
    parts = [(p.model.name, f"{_times(p)}{p.device.name}", p.weight_dtype, f"KV {p.kv_dtype}") for p in plans]
    differing = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    return [", ".join(row) for row in zip(*differing, strict=True)] if differing else [part[1] for part in parts]


def reading_rows(tpot_s: float) -> list[list[str]]:
    return [
        [r.who, f"{r.words_per_minute}", f"{r.tpot_s * 1e3:.0f}", "yes" if tpot_s <= r.tpot_s else "no"]
        for r in READERS
    ]


def _readers_of(plans: Sequence[Plan]) -> list[list[str]]:
    """Kinds of readers, and of each plan whether it keeps up with them."""
    by_plan = [[row[-1] for row in reading_rows(plan.tpot_s)] for plan in plans]
    return [
        [r.who, f"{r.words_per_minute}", f"{r.tpot_s * 1e3:.0f} ms", *kept]
        for r, *kept in zip(READERS, *by_plan, strict=True)
    ]


def html_page(plans: Sequence[Plan], command: Sequence[str] = ()) -> str:
    """A page of one plan, or of several side by side."""
    names = short_labels(plans)
    curves = [(name, plan.curve()) for name, plan in zip(names, plans, strict=True)]
    drawn = [
        line_chart(
            "Throughput against latency",
            Axis("TPOT, ms"),
            Axis("output tokens/s"),
            [Series(name, [(load.tpot_s * 1e3, load.output_tok_s) for load in loads]) for name, loads in curves],
        ),
        line_chart(
            "Time to the first token against load",
            Axis("requests at once", is_log=True),
            Axis("TTFT, ms"),
            [Series(name, [(load.concurrency, load.ttft_s * 1e3) for load in loads]) for name, loads in curves],
        ),
        line_chart(
            "Throughput against load",
            Axis("requests at once", is_log=True),
            Axis("output tokens/s"),
            [Series(name, [(load.concurrency, load.output_tok_s) for load in loads]) for name, loads in curves],
        ),
        stacked_bars(
            "Memory by part, one device",
            Axis("GB"),
            [
                (name, [(part, size / GB) for part, size in memory_parts(plan)])
                for name, plan in zip(names, plans, strict=True)
            ],
        ),
    ]
    is_open = " open" if len(plans) == 1 else ""
    details = [
        f"<details{is_open}><summary>{escape(label(plan))}</summary>"
        + table(("", ""), facts(plan), is_words=True)
        + "</details>"
        for plan in plans
    ]
    readers = table(("a reader who", "words/min", "needs TPOT", *names), _readers_of(plans))
    side_by_side = [table(*compared_by_row(plans))] if len(plans) > 1 else []
    sections = [*side_by_side, charts(drawn), "<h2>Details</h2>", *details, "<h2>Reading speed</h2>", readers]
    return page(_heading(plans, command), sections)


def _heading(plans: Sequence[Plan], command: Sequence[str]) -> Heading:
    asked = plans[0].question
    models, devices = (
        ", ".join(dict.fromkeys(names)) for names in zip(*((p.model.name, p.device.name) for p in plans), strict=True)
    )
    about = [
        ("model", models),
        ("device", devices),
        ("lengths", f"{asked.input_len:,} tokens in, {asked.output_len:,} out"),
        ("date", today()),
    ]
    shown = f"tokenmill {shlex.join(command)}" if command else ""
    said = verdict(plans[0]) if len(plans) == 1 else fit_verdict(plans)
    return Heading(f"Plan: {models} on {devices}", about, shown, said)
