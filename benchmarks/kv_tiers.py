"""What it brings to keep KV blocks beside the pool, and what it costs where nothing is found.

    python benchmarks/kv_tiers.py disk [MODEL] [--conversations 20] [--tokens 4096] [--folder DIR]
    python benchmarks/kv_tiers.py cost [MODEL] [--rounds 5]
    python benchmarks/kv_tiers.py host [SHAPE] [--tokens 32768]            (a GPU, random weights)

disk: conversations that do not fit into the pool, twice, and once more after a restart: seconds to the first token, and
whether all tokens are those of an engine without the folder. cost: prompts that are never seen again, with and without
the folder in turns, by the clock and by processor time. host: a prefix from pinned memory against computing it, the
copies' bandwidth against a plain pinned copy, and the steps of others meanwhile. One JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenmill import LLM, SamplingParams
from tokenmill.types import PromptRequest

NUM_BLOCKS = 512


def conversation(number: int, length: int) -> list[int]:
    drawing = random.Random(number)
    return [drawing.randrange(1000, 30_000) for _ in range(length)]


def first_tokens(llm: LLM, prompts: list[list[int]]) -> tuple[list[float], list[list[int]]]:
    """Seconds to the first token of each prompt, one after another, and the first tokens of each."""
    seconds, answers = [], []
    for number, prompt in enumerate(prompts):
        asked = PromptRequest(
            prompt=prompt, params=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), request_id=str(number)
        )
        began, tokens, first_s = time.perf_counter(), [], 0.0
        llm.core.add(llm.frontend.input_processor(len(prompt) + 64).process(asked))
        while llm.core.has_work:
            for output in llm.core.step():
                first_s = first_s or time.perf_counter() - began
                tokens += output.token_ids
        seconds.append(first_s)
        answers.append(tokens)
    return seconds, answers


def disk(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    prompts = [conversation(number, args.tokens) for number in range(args.conversations)]
    settings: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "speculate": "off"}
    plain = LLM(args.model, **settings)
    first_tokens(plain, [conversation(-1, 512)])
    computed_s, expected = first_tokens(plain, prompts)
    del plain
    found: dict[str, Any] = {"computed_s": statistics.median(computed_s)}
    llm = LLM(args.model, kv_disk=folder, **settings)
    first_tokens(llm, [conversation(-1, 512)])
    for turn in ("written_s", "again_s", "restarted_s"):
        if turn == "restarted_s":
            llm.close()
            llm = LLM(args.model, kv_disk=folder, **settings)
            first_tokens(llm, [conversation(-1, 512)])
        seconds, answers = first_tokens(llm, prompts)
        found[turn], found[f"{turn[:-2]}_is_same"] = statistics.median(seconds), answers == expected
        print(turn, round(statistics.median(seconds), 4), round(max(seconds), 4), answers == expected, flush=True)
    stats = llm.core.stats()
    found["gb_per_s"] = stats.fetched_bytes / max(1e-9, stats.fetch_s) / 1e9
    found["again_times"], found["restarted_times"] = (
        found["computed_s"] / found[one] for one in ("again_s", "restarted_s")
    )
    llm.close()
    return found


def cost(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Prompts of 1,024 tokens and their answers, each engine's turn after the other's."""
    engines = {
        "without": LLM(args.model, num_blocks=NUM_BLOCKS, speculate="off"),
        "with": LLM(args.model, num_blocks=NUM_BLOCKS, speculate="off", kv_disk=folder),
    }
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    processor_s: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(args.rounds + 1):
        for name, llm in engines.items():
            prompts = [conversation(number * 100 + place, 1024) for place in range(4)]
            began, processor_began = time.perf_counter(), time.process_time()
            llm.generate(prompts, params, progress=False)
            seconds[name] += [time.perf_counter() - began] if number else []
            if name == "with":
                wait_until_saved(llm)
            processor_s[name] += [time.process_time() - processor_began] if number else []
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    engines["with"].close()
    ratios, processor_ratios = (
        [one / other for one, other in zip(each["with"], each["without"], strict=True)]
        for each in (seconds, processor_s)
    )
    saved = engines["with"].core.stats().saved_bytes
    return {
        **medians,
        "ratio": statistics.median(ratios),
        "processor_ratio": statistics.median(processor_ratios),
        "processor_ratios": [round(ratio, 3) for ratio in processor_ratios],
        "saved_mb": saved / 1e6,
    }


def host(args: argparse.Namespace, _: str) -> dict[str, Any]:
    import torch

    from tokenmill.ops.triton.launch import compile_workers

    compile_workers.enable()  # as in a server's engine process
    length = args.tokens
    llm = LLM(
        args.model,
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        num_blocks=2 * length // 16 + 600,
        max_context=length + 256,
        max_running=16,
        speculate="off",
        kv_host_gb=args.host_gb,
        deterministic=args.deterministic,
    )
    found: dict[str, Any] = {"tokens": length, "deterministic": args.deterministic}

    def note(**figures: Any) -> None:
        found.update(figures)
        print(
            {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()},
            flush=True,
        )

    began = time.perf_counter()
    while llm.core.run_idle_task():  # as a server does before its first request
        pass
    first_tokens(llm, [conversation(-1, length // 4)])
    note(prepared_s=time.perf_counter() - began)
    one, *others = (conversation(number, length) for number in range(1, 5))
    (first_s,), expected = first_tokens(llm, [one])
    computed_s, computed = first_tokens(llm, others)  # together they take all of the first one's blocks
    saved_bytes = llm.core.stats().saved_bytes
    wait_until_saved(llm)
    note(
        first_s=first_s,
        computed_s=statistics.median(computed_s),
        saved_gb=saved_bytes / 1e9,
        saved_in_the_end_gb=llm.core.stats().saved_bytes / 1e9,
    )
    before = llm.core.stats()
    compiled = compiled_kernels()
    answers = []
    for name, prompt in (("first", one), ("second", others[0]), ("third", others[2]), ("pooled", others[2])):
        compiled.clear()
        phases, answer = phases_of(llm, prompt)
        answers.append(answer)
        note(**{name: phases, f"{name}_compiled": sorted(set(compiled))})
    stats = llm.core.stats()
    fetch_s = max(1e-9, stats.fetch_s - before.fetch_s)
    fetched_s = statistics.mean((found["second"]["first_token_s"], found["third"]["first_token_s"]))
    note(
        fetched_s=fetched_s,
        times=found["computed_s"] / fetched_s,
        times_at_first=found["computed_s"] / found["first"]["first_token_s"],
        is_same=answers == [*expected, computed[0], computed[2], computed[2]],
        fetched_tokens=stats.fetched_tokens - before.fetched_tokens,
        fetch_s=fetch_s,
        gb_per_s=(stats.fetched_bytes - before.fetched_bytes) / fetch_s / 1e9,
    )
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(pinned, device="cuda")
    device.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(4):
        device.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    pinned_gb_per_s = 4 * pinned.nbytes / (time.perf_counter() - began) / 1e9
    note(pinned_gb_per_s=pinned_gb_per_s, share=found["gb_per_s"] / pinned_gb_per_s)
    del pinned, device
    note(**steps_beside(llm, others[1]))
    return found


def compiled_kernels() -> list[str]:
    """A list that grows by a name for each kernel that is compiled from now on, or loaded from a compiler's cache."""
    from triton import knobs

    names: list[str] = []

    def note(**asked: Any) -> None:
        names.append(asked["fn"].name)

    knobs.runtime.jit_cache_hook = note
    return names


def phases_of(llm: LLM, prompt: list[int]) -> tuple[dict[str, float], list[int]]:
    """Where the time to the first token of a prompt goes, in seconds since it was asked for, and its first tokens."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    fetched, steps, tokens = llm.core.stats().fetched_tokens, 0, []
    began = time.perf_counter()
    request = llm.frontend.input_processor(len(prompt) + 64).process(
        PromptRequest(prompt=prompt, params=params, request_id="prefix")
    )
    llm.core.add(request)
    phases = {"added_s": time.perf_counter() - began}
    while llm.core.has_work:
        step_began = time.perf_counter() - began
        outputs = llm.core.step()
        if "first_token_s" not in phases:
            steps += 1
            if llm.core.stats().fetched_tokens > fetched:  # a step begins by taking in what has arrived
                phases.setdefault("arrived_s", step_began)
            if outputs:
                phases |= {"last_step_began_s": step_began, "first_token_s": time.perf_counter() - began}
        for output in outputs:
            tokens += output.token_ids
    return {**{name: round(value, 4) for name, value in phases.items()}, "steps": steps}, tokens


def wait_until_saved(llm: LLM) -> None:
    """Wait until no more bytes are saved."""
    saved, before = llm.core.stats().saved_bytes, -1
    while saved != before:
        time.sleep(0.5)
        saved, before = llm.core.stats().saved_bytes, saved


def steps_beside(llm: LLM, prompt: list[int]) -> dict[str, float]:
    """Seconds of steps that decode eight streams, alone and while a prefix is fetched beside them."""
    for number in range(8):
        params = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
        asked = PromptRequest(prompt=conversation(50 + number, 64), params=params, request_id=f"stream{number}")
        llm.core.add(llm.frontend.input_processor(4096).process(asked))
    alone, beside = [], []
    for number in range(400):
        began = time.perf_counter()
        llm.core.step()
        alone += [time.perf_counter() - began] if number >= 200 else []
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    asked = PromptRequest(prompt=prompt, params=params, request_id="prefix")
    llm.core.add(llm.frontend.input_processor(len(prompt) + 64).process(asked))
    is_there = False
    while not is_there:
        before = llm.core.stats().fetched_tokens
        began = time.perf_counter()
        outputs = llm.core.step()
        if llm.core.stats().fetched_tokens == before:
            beside.append(time.perf_counter() - began)
        is_there = any(output.request_id == "prefix" for output in outputs)
    llm.close()
    return {
        "step_ms": statistics.mean(alone) * 1e3,
        "step_p50_ms": statistics.median(alone) * 1e3,
        "step_beside_ms": statistics.mean(beside[:-3] or [0]) * 1e3,
        "step_beside_p50_ms": statistics.median(beside[:-3] or [0]) * 1e3,
        "steps_beside": len(beside),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["disk", "cost", "host"])
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host-gb", type=float, default=16.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="tokenmill-kv-"))
    try:
        found = {"disk": disk, "cost": cost, "host": host}[args.what](args, str(folder))
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}))


if __name__ == "__main__":
    main()
