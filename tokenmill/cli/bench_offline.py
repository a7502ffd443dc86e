"""`tokenmill bench offline`: the engine in this process, without a server."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from cyclopts import Parameter

from tokenmill.cli import flags, session
from tokenmill.cli.amounts import Count, CountOrZero
from tokenmill.cli.tables import number, print_json_line, print_rich_table, share
from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidConfig


def offline(
    model: str | None = None,
    /,
    *,
    input_len: str = "128",
    output_len: str = "32",
    concurrency: str = "1,4,16",
    num_requests: CountOrZero = 0,
    rounds: Count = 1,
    bench_seed: int = 1,
    peaks: Annotated[bool, Parameter(negative="--no-peaks")] = True,
    engine: flags.BatchEngineFlags = flags.ENGINE,
) -> int:
    """Prefill and decode speed of the engine alone, with several sequences at once.

    Prompts are random tokens, whose answers repeat themselves: `--speculate auto` counts as off here.

    Parameters
    ----------
    model
        Short name, GGUF file, model directory, config.json (with --load-format dummy) or Hugging Face id.
    input_len
        Prompt tokens: a number, or LOW:HIGH for lengths drawn uniformly.
    output_len
        Answer tokens: a number or LOW:HIGH. 1 measures prefill only.
    concurrency
        Sequences at once, a list: 1,4,16. Empty measures only --num-requests.
    num_requests
        Also run so many requests through the scheduler at once, as a batch job.
    rounds
        Repeat each measurement; medians are shown.
    bench_seed
        Seed of lengths and prompts.
    peaks
        Measure the machine first and show which share of it is used.
    """
    from tokenmill.bench import offline as bench
    from tokenmill.bench.lengths import Lengths

    workload = bench.OfflineWorkload(
        Lengths.parse(input_len, "input-len"),
        Lengths.parse(output_len, "output-len"),
        whole_numbers(concurrency, "concurrency", can_be_empty=num_requests > 0),
        num_requests,
        bench_seed,
        rounds,
    )
    config = bench.config_for(engine.config(model), workload)
    report = measure(config, workload, with_peaks=peaks)
    show(report)
    print_json_line(report)
    return 0


def whole_numbers(text: str, param: str, *, can_be_empty: bool = False) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip() or not can_be_empty)
    except ValueError:
        raise InvalidConfig(f"{param} must be a list like 1,4,16, not {text!r}", param=param) from None
    if any(value < 1 for value in found):
        raise InvalidConfig(f"{param} must be positive", param=param)
    return found


def measure(config: EngineConfig, workload: Any, *, with_peaks: bool) -> dict[str, Any]:
    from tokenmill.bench import offline as bench
    from tokenmill.bench.peaks import machine_peaks

    session.fetch(config.model.model)
    measured = bench.open_measured(config)
    found = machine_peaks(measured.device, measured.weight_dtype, config.ops.threads) if with_peaks else None
    results = [bench.against_peaks(result, found) for result in bench.in_turns(measured, [workload], tell)]
    report: dict[str, Any] = {
        "benchmark": "offline",
        "model": measured.llm.frontend.name,
        "device": measured.device,
        "weight_dtype": measured.weight_dtype,
        "weight_bytes": measured.parts.total,
        "kv_dtype": measured.kv_dtype,
        "threads": config.ops.threads,
        "load_s": measured.llm.core.info.load_s,
        "reasons": measured.llm.core.info.reasons,
        **(found.as_dict() if found else {}),
        "results": results,
    }
    if workload.num_requests:
        report["throughput"] = bench.measure_throughput(measured, workload)
    return report


def tell(result: dict[str, Any]) -> None:
    """One line on stderr for every measurement; all of them may take a while."""
    decode = f", decode {number(result['decode_tok_s'])} tok/s" if result["decode_tok_s"] else ""
    many = f"{result['concurrency']} sequence{'' if result['concurrency'] == 1 else 's'} of {result['input_len']:.0f}"
    line = f"{many}: prefill {number(result['prefill_tok_s'], 0)} tok/s{decode}"
    print(line, file=sys.stderr, flush=True)


def show(report: dict[str, Any]) -> None:
    title = f"{report['model']} on {report['device']}, weights {report['weight_dtype']}, KV {report['kv_dtype']}"
    columns = ("sequences", "prefill tok/s", "GFLOP/s", "of peak", "decode tok/s", "ms a step", "p99", "host ms",
               "GB/s", "of peak", "GFLOP/s")  # fmt: skip
    if report["results"]:
        print_rich_table(title, columns, [_row(result) for result in report["results"]])
    if "peak_device" in report:
        print(
            f"{report['peak_device']}, {report['peak_source']}: {report['peak_bandwidth_bytes_s'] / 1e9:.1f} GB/s, "
            f"{report['peak_flops'] / 1e9:,.0f} GFLOP/s {report['peak_flops_dtype']}"
        )
    if "throughput" in report:
        t = report["throughput"]
        print(
            f"{t['num_requests']} requests in {t['elapsed_s']:.2f} s: {t['requests_s']:.2f} requests/s, "
            f"{t['output_tok_s']:,.0f} output tok/s, {t['total_tok_s']:,.0f} tok/s in all ({t['steps']} steps)"
        )


def _row(r: dict[str, Any]) -> list[str]:
    def scaled(key: str, scale: float) -> float | None:
        return r[key] / scale if r.get(key) is not None else None

    return [
        str(r["concurrency"]),
        number(r["prefill_tok_s"], 0),
        number(scaled("prefill_flops_s", 1e9), 0),
        share(r.get("prefill_mfu")),
        number(r["decode_tok_s"]),
        number(r.get("decode_step_ms"), 2),
        number(r.get("decode_step_ms_p99"), 2),
        number(r.get("host_ms_per_step"), 2),
        number(scaled("decode_bytes_s", 1e9), 1),
        share(r.get("decode_mbu")),
        number(scaled("decode_flops_s", 1e9), 0),
    ]
