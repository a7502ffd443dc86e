"""Reports of plans: rows of a table, and an HTML page with plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from tokenmill.planner.capacity import READERS, readers_kept_up_with
from tokenmill.planner.plan import Plan
from tokenmill.report.charts import Axis, Series, line_chart, page, stacked_bars, table

GB = 1e9


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
        ("TTFT", f"{f['ttft_s'] * 1e3:,.0f} ms, one request alone ({_reached(plan, 'prefill')})"),
        ("TPOT", f"{f['tpot_s'] * 1e3:.1f} ms with {f['batch']} running ({_reached(plan, 'decode')}){_readers(plan)}"),
        ("most at once", _most(plan)),
        ("price", _price(plan)),
        *[("!", warning) for warning in plan.warnings()],
    ]  # fmt: skip


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
        f"(TTFT {best.ttft_s * 1e3:,.0f} ms, TPOT {best.tpot_s * 1e3:.1f} ms); memory holds {held}"
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
    ("TTFT, ms", lambda f: f"{f['ttft_s'] * 1e3:,.0f}"),
    ("TPOT, ms", lambda f: f"{f['tpot_s'] * 1e3:.1f}"),
    ("most at once", lambda f: f"{f['max_concurrency']}"),
    ("requests/s", lambda f: f"{f['max_requests_s']:.2f}"),
    ("output tok/s", lambda f: f"{f['max_output_tok_s']:,.0f}"),
    ("$ / M output", lambda f: "–" if f["usd_per_million_output"] is None else f"{f['usd_per_million_output']:.3f}"),
)


def comparison(plans: Sequence[Plan]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows: one figure per row, one plan per column."""
    flats = [plan.flat() for plan in plans]
    return ["", *[label(plan) for plan in plans]], [[name, *[show(f) for f in flats]] for name, show in COMPARED]


def label(plan: Plan) -> str:
    split = plan.question.split
    times = f"{split.num_devices} × " if split.num_devices > 1 else ""
    kv = f", KV {plan.kv_dtype}" if plan.question.kv_dtype != "auto" else ""
    return f"{plan.model.name}, {times}{plan.device.name}, {plan.weight_dtype}{kv}"


def reading_rows(tpot_s: float) -> list[list[str]]:
    return [
        [r.who, f"{r.words_per_minute}", f"{r.tpot_s * 1e3:.0f}", "yes" if tpot_s <= r.tpot_s else "no"]
        for r in READERS
    ]


def html_page(plans: Sequence[Plan]) -> str:
    curves = [(label(plan), plan.curve()) for plan in plans]
    charts = [
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
        stacked_bars(
            "Memory by part, one device",
            Axis("GB"),
            [
                (str(number + 1), [(name, size / GB) for name, size in memory_parts(plan)])
                for number, plan in enumerate(plans)
            ],
        ),
    ]
    tables = [
        f"<h2>{number + 1}. {escape(label(plan))}</h2>" + table(("", ""), facts(plan))
        for number, plan in enumerate(plans)
    ]
    readers = table(("a reader who", "words/min", "needs TPOT, ms", "kept up with"), reading_rows(plans[0].tpot_s))
    side_by_side = [table(*comparison(plans))] if len(plans) > 1 else []
    return page("Plan", [*side_by_side, *charts, *tables, "<h2>Reading speed</h2>", readers])
