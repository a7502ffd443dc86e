"""`tokenmill bench latency`, `startup` and `compare`: one request's time, a start's time, engines side by side."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from tokenmill.cli import flags, session
from tokenmill.cli.amounts import Count
from tokenmill.cli.bench_offline import tell, whole_numbers
from tokenmill.cli.tables import number, print_json_line, print_rich_table
from tokenmill.config import ActivationBits
from tokenmill.errors import InvalidConfig
from tokenmill.store import DEFAULT_MODEL, resolve_model

if TYPE_CHECKING:
    from tokenmill.bench.compare import Turn


def latency(
    model: flags.ModelName = None,
    /,
    *,
    batch_sizes: str = "1,4,16",
    input_lens: str = "32,128,512",
    output_len: Annotated[int, Parameter(validator=Number(gte=2))] = 16,
    rounds: Count = 3,
    engine: flags.BatchEngineFlags = flags.ENGINE,
) -> int:
    """Time to the first token and per token, over batch sizes and prompt lengths.

    Parameters
    ----------
    batch_sizes
        Sequences at once, a list.
    input_lens
        Prompt lengths in tokens, a list.
    output_len
        Tokens of each answer.
    rounds
        Repeats of each measurement; medians are shown.
    """
    from tokenmill.bench import offline as bench
    from tokenmill.bench.lengths import Lengths

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
    print_rich_table(f"{measured.llm.frontend.name}: latency", ("sequences × prompt", "TTFT ms", "ms per token"), rows)
    print_json_line({"benchmark": "latency", "model": measured.llm.frontend.name, "results": results})
    return 0


def startup(
    model: flags.ModelName = None,
    /,
    *,
    rounds: Count = 3,
    engine: flags.EngineFlags = flags.ENGINE,
) -> int:
    """From a cold process to the first token: import, load, first token; and to a server that answers.

    Parameters
    ----------
    rounds
        Starts; the first warms the disk's cache and is left out.
    """
    from tokenmill.bench import startup as starts

    # `LLM` and the commands have different defaults for a fast start: what was not asked for is left to them.
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
    print_rich_table(f"Start of {config.model.model}", ("stage", "seconds"), rows)
    print_json_line({"benchmark": "startup", "model": config.model.model, "rounds": rounds, **found})
    return 0


def changed_settings(config: Any) -> dict[str, Any]:
    """Fields that differ from their defaults, by name, as `LLM(...)` takes them."""
    parts = (config.model, config.cache, config.scheduler, config.ops)
    return {
        field.name: getattr(part, field.name)
        for part in parts
        for field in fields(part)
        if field.name != "model" and getattr(part, field.name) != field.default
    }


def changed_flags(config: Any) -> list[str]:
    """The same as flags; a switch is given by its name alone."""
    found = []
    for section in ("model", "cache", "scheduler", "ops"):
        part = getattr(config, section)
        for field in fields(part):
            value = getattr(part, field.name)
            if field.name != "model" and value != field.default:
                flag = flags.flag_name(section, field.name)
                found.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag}={value}")
    return found


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
) -> int:
    """The same GGUF file through this engine and its peers, taking turns.

    Parameters
    ----------
    model
        GGUF file, or a short name whose file is one.
    peers
        Engines to compare with, a list of llama.cpp and openvino (`pip install llama-cpp-python openvino-genai`).
    peer_python
        Python that has the peers installed.
    batched_bench
        A `llama-batched-bench` of your own build, compared as one more engine.
    input_len
        Prompt tokens.
    output_len
        Answer tokens.
    concurrency
        Sequences at once, a list.
    threads
        Threads of every engine.
    activation_bits
        How finely this engine rounds activations (see `tokenmill run --help`).
    rounds
        Rounds; medians of ratios are shown with their quartiles.
    """
    from tokenmill.bench import compare as bench

    path = _common_file(model)
    counts = whole_numbers(concurrency, "concurrency")
    shapes = [{"input_len": input_len, "output_len": output_len, "concurrency": c} for c in counts]
    names = [*_others(peers), bench.OURS]
    _require_program(batched_bench)
    ours = (activation_bits, json.dumps({**shapes[-1], "concurrency": max(counts), "seed": 0}))  # what to make room for
    with bench.engines(names, peer_python, path, threads, batched_bench, ours) as running:
        turns = [_told(turn) for turn in bench.take_turns(running, shapes, rounds)]
        versions = {engine.name: engine.version for engine in running}
    found = bench.compared(turns)
    _show_comparison(path, found, versions)
    print_json_line(
        {"benchmark": "compare", "model": path.name, "threads": threads, "activation_bits": activation_bits,
         "input_len": input_len, "output_len": output_len, "rounds": rounds, "versions": versions,
         "results": [c.as_dict() for c in found]}
    )  # fmt: skip
    return 0


def _common_file(model: str) -> Path:
    path = resolve_model(model).path
    if path.suffix != ".gguf":
        raise InvalidConfig(f"{model} is no GGUF file, which all engines could read", param="model")
    return path


def _others(peers: str) -> list[str]:
    from tokenmill.bench.compare import OURS

    named = list(dict.fromkeys(peer.strip() for peer in peers.split(",") if peer.strip()))
    if OURS in named:
        raise InvalidConfig(f"{OURS} takes part in any case; name the others", param="peers")
    return named


def _require_program(file: Path | None) -> None:
    if file is not None and not (file.is_file() and os.access(file, os.X_OK)):
        raise InvalidConfig(f"{file} is no program that can be run", param="batched_bench")


def _told(turn: Turn) -> Turn:
    """A line for each turn as it ends: a comparison takes minutes, and one broken off has still told something."""
    name, shape, figures = turn
    speeds = [f"{figure.removesuffix('_tok_s')} {number(value)} tok/s" for figure, value in figures.items() if value]
    print(f"  {name}, {shape['concurrency']} at once: {', '.join(speeds)}", file=sys.stderr, flush=True)
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
    print_rich_table(f"{path.name}, taking turns", columns, rows)
