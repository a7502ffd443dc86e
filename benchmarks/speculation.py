"""What speculation gains where text repeats itself, and what it costs where it does not.

    python benchmarks/speculation.py [--model MODEL] [--threads N] [--rounds 3] [--tokens 64] [--part edit|sonnets|all]

edit       a letter is written again to someone else: `ngram` and `auto` against `off`, one sequence
sonnets    20 beginnings of sonnets go on for --tokens tokens: `auto` against `off`, 1, 4 and 16 sequences at once

The engines take turns within a round; a ratio is the median over the rounds. Every round has a cache salt of its own,
so that no answer is known from the round before. All answers are compared: speculation must not change a token.
Prints a table and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tokenmill import LLM, SamplingParams
from tokenmill.types import PromptRequest

SONNETS = Path(__file__).resolve().parents[2] / "shared" / "traces" / "sonnet.txt"
NUM_PROMPTS, LINES_OF_PROMPT = 20, 4
LEAST_GAIN, LEAST_SHARE = 1.8, 0.98
LETTER = """Dear Martha, the garden is doing well this year. The roses by the gate have opened, and the beans behind
the shed have climbed to the roof. On Monday the rain filled both barrels, so there is water enough for
the tomatoes, the lettuce and the small apple tree that you planted in April. The neighbours lent me
their ladder, and I have painted the gate, the bench and the old door of the shed in the same dark green.
If the weather holds, the plums will be ripe when you come in August, and we shall make the jam together
as we did when we were children. Write soon and tell me when your train arrives, so that I can meet you
at the station with the cart. The dog sends his regards and has grown fat."""
AGAIN = "\n\nThe same letter, written to Anna instead of Martha:\n\nDear Anna, the garden"

Asked = list[PromptRequest]


class SpeculationRun(NamedTuple):
    seconds: float
    tokens: list[list[int]]
    drafted: int
    accepted: int


def run(llm: LLM, asked: Asked) -> SpeculationRun:
    input_processor = llm.frontend.input_processor(llm.core.info.max_context)
    requests = [input_processor.process(one) for one in asked]
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    before, began = llm.core.stats(), time.perf_counter()
    for request in requests:
        llm.core.add(request)
    while llm.core.has_work:
        for output in llm.core.step():
            found[output.request_id] += output.token_ids
    seconds, after = time.perf_counter() - began, llm.core.stats()
    drafted = after.drafted_tokens - before.drafted_tokens
    return SpeculationRun(seconds, list(found.values()), drafted, after.accepted_tokens - before.accepted_tokens)


def edit_requests(salt: str) -> Asked:
    params = SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True)
    return [PromptRequest(prompt="A letter:\n\n" + " ".join(LETTER.split()) + AGAIN, params=params, cache_salt=salt)]


def sonnet_requests(salt: str, num_tokens: int) -> Asked:
    lines = [line for line in SONNETS.read_text(encoding="utf-8").splitlines() if line.strip()]
    starts = range(0, NUM_PROMPTS * LINES_OF_PROMPT, LINES_OF_PROMPT)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [
        PromptRequest(prompt="\n".join(lines[start : start + LINES_OF_PROMPT]), params=params, cache_salt=salt)
        for start in starts
    ]


def compared(name: str, engines: dict[str, LLM], rounds: int, asked: dict[int, Asked]) -> dict[str, float]:
    """Median of how many times as fast as `off` each engine was; `asked` by round."""
    ratios: dict[str, list[float]] = {mode: [] for mode in engines if mode != "off"}
    for number in range(rounds):
        order = list(engines) if number % 2 == 0 else list(reversed(engines))
        found = {mode: run(engines[mode], asked[number]) for mode in order}
        for mode, one in found.items():
            assert one.tokens == found["off"].tokens, f"{mode} changed the answers"
            num_tokens = sum(map(len, one.tokens))
            ratio = found["off"].seconds / one.seconds
            share = f", {one.accepted} of {one.drafted} guesses right" if one.drafted else ""
            rate = f"{num_tokens} tokens {one.seconds:7.2f} s {num_tokens / one.seconds:7.1f} tokens/s"
            print(f"{name:12} {mode:6} {rate}  x {ratio:.3f}{share}", flush=True)
            if mode != "off":
                ratios[mode].append(ratio)
    return {mode: statistics.median(values) for mode, values in ratios.items()}


def engine(asked: argparse.Namespace, mode: str, max_running: int) -> LLM:
    llm = LLM(asked.model, threads=asked.threads, speculate=mode, max_running=max_running, prefix_caching=False)
    run(llm, sonnet_requests("warm", 4)[:max_running])
    return llm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--sequences", default="1,4,16")
    parser.add_argument("--part", choices=("edit", "sonnets", "all"), default="all")
    asked = parser.parse_args()
    figures: dict[str, float] = {}
    passed = True
    if asked.part != "sonnets":
        engines = {mode: engine(asked, mode, 1) for mode in ("off", "ngram", "auto")}
        found = compared("edit", engines, asked.rounds, {n: edit_requests(f"e{n}") for n in range(asked.rounds)})
        figures |= {f"edit_{mode}": ratio for mode, ratio in found.items()}
        passed = found["ngram"] >= LEAST_GAIN
    if asked.part != "edit":
        for sequences in map(int, asked.sequences.split(",")):
            engines = {mode: engine(asked, mode, sequences) for mode in ("off", "auto")}
            requests = {n: sonnet_requests(f"s{n}", asked.tokens) for n in range(asked.rounds)}
            found = compared(f"sonnets x{sequences}", engines, asked.rounds, requests)
            figures[f"sonnets_{sequences}_auto"] = found["auto"]
            passed = passed and found["auto"] >= LEAST_SHARE
    for name, ratio in figures.items():
        print(f"{name:18} {ratio:.3f} times as fast as off")
    print(json.dumps({**{name: round(ratio, 3) for name, ratio in figures.items()}, "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
