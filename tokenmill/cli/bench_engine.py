"""`tokenmill bench offline`, `latency`, `startup`, `compare` and `links`: the engine without a server, and its
peers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from tokenmill.cli import flags, session
from tokenmill.cli.flags import Count, CountOrZero
from tokenmill.cli.output import number, print_result, print_rich_table, share
from tokenmill.config import ActivationBits, EngineConfig
from tokenmill.errors import InvalidConfig
from tokenmill.store import DEFAULT_MODEL, resolve_model

if TYPE_CHECKING:
    from tokenmill.bench.compare import Turn


# ── offline ──────────────────────────────────────────────────────────────────────────────────────────


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
    json: flags.Switch = False,
    engine: flags.EngineFlags = flags.ENGINE,
) -> int:
    """Measure prefill and decode speed of the engine alone, with several concurrent sequences.

    Prompts are random tokens, which lead to repetitive answers, so `--speculate auto` means `off` here.

    Parameters
    ----------
    model
        Short name, GGUF file, model directory, config.json (with --load-format dummy) or Hugging Face id.
    input_len
        Prompt tokens: a number, or LOW:HIGH for lengths drawn uniformly.
    output_len
        Answer tokens: a number or LOW:HIGH. 1 measures prefill only.
    concurrency
        Numbers of concurrent sequences, such as 1,4,16. Empty: measure only --num-requests.
    num_requests
        Also run this many requests as a batch job, all submitted at the start.
    rounds
        Repeat each measurement; medians are shown.
    bench_seed
        Random seed of lengths and prompts.
    peaks
        Measure the machine's peak speeds first and report the share of them that is reached.
    json
        Print one JSON object instead of tables; into a pipe it is always printed as the last line.
    """
    from tokenmill.bench import offline as bench
    from tokenmill.bench.traffic import Lengths

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
    if not json:
        show(report)
    print_result(report, as_json=json)
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
    from tokenmill.bench.utilisation import machine_peaks

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
    """Print one line on stderr for each measurement, because the whole benchmark may take long."""
    decode = f", decode {number(result['decode_tok_s'])} tok/s" if result["decode_tok_s"] else ""
    many = f"{result['concurrency']} sequence{'' if result['concurrency'] == 1 else 's'} of {result['input_len']:.0f}"
    line = f"{many}: prefill {number(result['prefill_tok_s'], 0)} tok/s{decode}"
    print(line, file=sys.stderr, flush=True)


def show(report: dict[str, Any]) -> None:
    title = f"{report['model']} on {report['device']}, weights {report['weight_dtype']}, KV {report['kv_dtype']}"
    columns = ("sequences", "prefill tok/s", "GFLOP/s", "of peak", "decode tok/s", "ms/step", "p99", "host ms",
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
            f"{t['output_tok_s']:,.0f} output tok/s, {t['total_tok_s']:,.0f} tok/s in total ({t['steps']} steps)"
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


# ── latency and start-up ─────────────────────────────────────────────────────────────────────────────


def latency(
    model: flags.ModelName = None,
    /,
    *,
    batch_sizes: str = "1,4,16",
    input_lens: str = "32,128,512",
    output_len: Annotated[int, Parameter(validator=Number(gte=2))] = 16,
    rounds: Count = 3,
    json: flags.Switch = False,
    engine: flags.EngineFlags = flags.ENGINE,
) -> int:
    """Measure time to first token and time per token by batch size and prompt length.

    Parameters
    ----------
    batch_sizes
        Numbers of concurrent sequences, such as 1,4,16.
    input_lens
        Prompt lengths in tokens, such as 32,128,512.
    output_len
        Tokens of each answer.
    rounds
        Repeats of each measurement; medians are shown.
    json
        Print one JSON object instead of tables; into a pipe it is always printed as the last line.
    """
    from tokenmill.bench import offline as bench
    from tokenmill.bench.traffic import Lengths

    batches, lengths = whole_numbers(batch_sizes, "batch-sizes"), whole_numbers(input_lens, "input-lens")
    answer = Lengths(output_len, output_len)
    workloads = [bench.OfflineWorkload(Lengths(length, length), answer, batches, rounds=rounds) for length in lengths]
    largest = max(workloads, key=lambda workload: workload.longest)
    config = bench.config_for(engine.config(model), largest)
    session.fetch(config.model.model)
    measured = bench.open_measured(config)
    results = bench.in_turns(measured, workloads, tell)
    rows = [
        [f"{r['concurrency']} × {r['input_len']:.0f}", number(r["ttft_last_s"] * 1e3), number(r["decode_step_ms"], 2)]
        for r in results
    ]
    name = measured.llm.frontend.name
    if not json:
        print_rich_table(f"{name}: latency", ("sequences × prompt", "TTFT ms", "ms per token"), rows)
    print_result({"benchmark": "latency", "model": name, "results": results}, as_json=json)
    return 0


def startup(
    model: flags.ModelName = None,
    /,
    *,
    rounds: Count = 3,
    json: flags.Switch = False,
    engine: flags.EngineFlags = flags.ENGINE,
) -> int:
    """Measure start-up times: from process start to the first token, and to a server that is ready.

    Parameters
    ----------
    rounds
        Number of starts; the first one warms the page cache and is not counted.
    json
        Print one JSON object instead of tables; into a pipe it is always printed as the last line.
    """
    from tokenmill.bench import startup as starts

    # `LLM` and the commands have different defaults of fast_start, so only changed settings are passed.
    config = replace(engine.config(model), ops=engine.ops)
    session.fetch(config.model.model)
    arguments = [config.model.model, *changed_flags(config)]
    kinds: dict[str, Callable[[], dict[str, float]]] = {
        "LLM(...)": lambda: starts.measure_starts(config.model.model, changed_settings(config), rounds),
        "tokenmill run": lambda: starts.measure_runs(arguments, rounds),
        "tokenmill serve": lambda: starts.measure_server_starts(arguments, rounds),
    }
    found: dict[str, float] = {}
    for what, measured in kinds.items():
        print(f"starting {what}, {rounds} times", file=sys.stderr, flush=True)
        found |= measured()
    stages = (*starts.STAGES, *starts.RUN_STAGES, *starts.SERVER_STAGES)
    rows = [[stage, number(found[stage], 3)] for stage in stages]
    if not json:
        print_rich_table(f"Start of {config.model.model}", ("stage", "seconds"), rows)
    print_result({"benchmark": "startup", "model": config.model.model, "rounds": rounds, **found}, as_json=json)
    return 0


def changed_settings(config: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as keyword arguments of `LLM(...)`."""
    parts = (config.model, config.cache, config.scheduler, config.ops)
    return {
        field.name: getattr(part, field.name)
        for part in parts
        for field in fields(part)
        if field.name != "model" and getattr(part, field.name) != field.default
    }


def changed_flags(config: Any) -> list[str]:
    """Return the fields that differ from their defaults, as flags."""
    found = []
    for section in ("model", "cache", "scheduler", "ops"):
        part = getattr(config, section)
        for field in fields(part):
            value = getattr(part, field.name)
            if field.name != "model" and value != field.default:
                flag = flags.flag_name(section, field.name)
                found.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag}={value}")
    return found


# ── comparison with other engines ─────────────────────────────────────────────────────────────────────────────


def compare(
    model: str = DEFAULT_MODEL,
    /,
    *,
    peers: str = "llama.cpp,openvino",
    peer_python: str = sys.executable,
    batched_bench: Path | None = None,
    input_len: Count = 128,
    output_len: Count = 32,
    concurrency: str = "1,4,16",
    threads: Count = 2,
    activation_bits: ActivationBits = "auto",
    rounds: Count = 5,
    html: Path | None = None,
    json: flags.Switch = False,
) -> int:
    """Compare this engine with other engines on the same GGUF file; the engines run in turns.

    Parameters
    ----------
    model
        GGUF file, or a short name of one.
    peers
        Engines to compare with, a list of llama.cpp and openvino (`pip install llama-cpp-python openvino-genai`).
    peer_python
        Python interpreter of the environment in which the peers are installed.
    batched_bench
        Path of a `llama-batched-bench` program, compared as one more engine.
    input_len
        Prompt tokens.
    output_len
        Answer tokens.
    concurrency
        Numbers of concurrent sequences, such as 1,4,16.
    threads
        Threads of every engine.
    activation_bits
        Precision of this engine's activations (see `tokenmill run --help-all`).
    rounds
        Number of rounds; ratios are shown as medians with quartiles.
    html
        Write a page with bar charts to this file.
    json
        Print one JSON object instead of tables; into a pipe it is always printed as the last line.
    """
    from tokenmill.bench import compare as bench

    flags.require_page(html)
    path = _common_file(model)
    counts = whole_numbers(concurrency, "concurrency")
    shapes = [{"input_len": input_len, "output_len": output_len, "concurrency": c} for c in counts]
    names = [*_others(peers), bench.OURS]
    _require_program(batched_bench)
    ours = (
        activation_bits,
        dumps({**shapes[-1], "concurrency": max(counts), "seed": 0}),
    )  # the largest run, which sets the context and batch size
    with bench.engines(names, peer_python, path, threads, batched_bench, ours) as running:
        turns = [_print_turn(turn) for turn in bench.take_turns(running, shapes, rounds)]
        versions = {engine.name: engine.version for engine in running}
    found = bench.compared(turns)
    if not json:
        _show_comparison(path, found, versions)
    if html is not None:
        from tokenmill.bench.pages import html_comparison

        asked = f"{input_len} tokens in, {output_len} out"
        about = [("model", path.name), ("threads", str(threads)), ("lengths", asked), ("rounds", str(rounds))]
        html.write_text(html_comparison(found, versions, about, sys.argv[1:]), encoding="utf-8")
    print_result(
        {"benchmark": "compare", "model": path.name, "threads": threads, "activation_bits": activation_bits,
         "input_len": input_len, "output_len": output_len, "rounds": rounds, "versions": versions,
         "results": [c.as_dict() for c in found]},
        as_json=json,
    )  # fmt: skip
    return 0


def _common_file(model: str) -> Path:
    path = resolve_model(model).path
    if path.suffix != ".gguf":
        raise InvalidConfig(f"{model} is not a GGUF file, which all engines can read", param="model")
    return path


def _others(peers: str) -> list[str]:
    from tokenmill.bench.compare import OURS

    named = list(dict.fromkeys(peer.strip() for peer in peers.split(",") if peer.strip()))
    if OURS in named:
        raise InvalidConfig(f"{OURS} is always compared; name only the others", param="peers")
    return named


def _require_program(file: Path | None) -> None:
    if file is not None and not (file.is_file() and os.access(file, os.X_OK)):
        raise InvalidConfig(f"{file} is not an executable program", param="batched_bench")


def _print_turn(turn: Turn) -> Turn:
    """Print a line for each finished turn, since a comparison takes minutes and may be interrupted."""
    name, shape, figures = turn
    speeds = [f"{figure.removesuffix('_tok_s')} {number(value)} tok/s" for figure, value in figures.items() if value]
    print(f"  {name}, {shape['concurrency']} concurrent: {', '.join(speeds)}", file=sys.stderr, flush=True)
    return turn


def _show_comparison(path: Path, found: list[Any], versions: dict[str, str]) -> None:
    rows = [
        [
            c.figure.removesuffix("_tok_s"),
            str(c.concurrency),
            versions[c.engine],
            number(c.as_dict()["median"]),
            str(c.ratio) if c.ratio else "",
        ]
        for c in sorted(found, key=lambda c: (c.figure, c.concurrency, c.engine))
    ]
    columns = ("phase", "sequences", "engine", "tok/s (median)", "ours / theirs (quartiles)")
    print_rich_table(f"{path.name}, measured in turns", columns, rows)


# ── links ────────────────────────────────────────────────────────────────────────────────────────────


def links(*, json: flags.Switch = False) -> int:
    """Measure latency and bandwidth between ranks of this machine (`plan --link FILE` reads the result).

    Parameters
    ----------
    json
        Print one JSON object instead of a table; into a pipe it is always printed as the last line.
    """
    from tokenmill.bench.links import measure_links

    found = measure_links()
    if not json:
        rows = [[link.title, number(link.latency_s * 1e6, 1), number(link.bytes_s / 1e9, 2)] for link in found]
        print_rich_table("links between two ranks", ("link", "µs", "GB/s"), rows)
    print_result({"benchmark": "links", "links": [link.flat() for link in found]}, as_json=json)
    return 0
