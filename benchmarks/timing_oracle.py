"""Test whether a tenant can infer what another has sent: from fields, headers, or the time to first token.

    python benchmarks/timing_oracle.py MODEL [--trials 500] [--prompt-len 96] [--answer-len 8] [-- serve flags]

In each trial a victim sends a prompt that nobody has sent before; then a spy sends either the same prompt or another
one of the same length, by the toss of a coin. Everything but the coin is equal. If the spy's first tokens come sooner
when it repeats the victim's prompt, the area under the ROC curve (AUC) of their times is above 0.5; with 500 trials
chance alone stays within 0.05 of it in 19 of 20 runs. The same with one tenant in both parts shows that the test can
see: a cached prompt is found there.

Fields of the answer and headers are compared too, except those that are meant to differ (ids, dates).

Prints a line a pair and, as the last line, one JSON object; exit code 1 where something tells.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
from served import BenchmarkServer

VICTIM, SPY = "victim", "spy"
MOST_AUC, LEAST_SEEN = 0.55, 0.9
OWN = {"id", "created", "date", "x-request-id", "request-id"}  # of every answer
LEAST_TOLD = 8  # times that something was told of one kind alone: once or twice is chance


class Trials:
    def __init__(self, server: BenchmarkServer, asked: argparse.Namespace, seed: int) -> None:
        self._http = httpx.Client(base_url=server.url, timeout=120)
        self._asked = asked
        self._rng = random.Random(seed)
        self.tells: Counter[str] = Counter()  # by coin: what fields and headers said

    def prompt(self) -> list[int]:
        return [self._rng.randrange(100, 4000) for _ in range(self._asked.prompt_len)]

    def send(self, key: str, prompt: Sequence[int]) -> tuple[float, str]:
        """Seconds to the first token, and all else that the answer tells."""
        body = {
            "model": "m", "prompt": list(prompt), "max_tokens": self._asked.answer_len, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        headers = {"authorization": f"Bearer {key}"}
        began, first_s, told = time.perf_counter(), None, []
        with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if first_s is None and event["choices"] and event["choices"][0]["text"]:
                        first_s = time.perf_counter() - began
                    told.append({k: v for k, v in event.items() if k not in OWN and k != "choices"})
            told.append({k: v for k, v in reply.headers.items() if k not in OWN})
        assert first_s is not None
        return first_s, json.dumps(told[-2:], sort_keys=True)

    def run(self, first: str, second: str, number: int) -> tuple[list[float], list[float]]:
        """Times of the second sender, by whether it repeated what the first had sent."""
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(number):
            sent, is_same = self.prompt(), self._rng.random() < 0.5
            self.send(first, sent)
            seconds, told = self.send(second, sent if is_same else self.prompt())
            times[is_same].append(seconds)
            self.tells[f"{'same' if is_same else 'other'} {told}"] += 1
        return times


def auc(sooner: Sequence[float], later: Sequence[float]) -> float:
    """The probability that one of the first is smaller than one of the second."""
    ranked = sorted([(value, 0) for value in sooner] + [(value, 1) for value in later])
    wins = num_later = 0
    for _, kind in reversed(ranked):
        num_later += kind
        wins += num_later if kind == 0 else 0
    return wins / (len(sooner) * len(later))


def tellings(tells: Counter[str]) -> tuple[set[str], set[str]]:
    """What was told of repeated prompts alone, and of others alone."""
    by_coin: dict[str, Counter[str]] = {"same": Counter(), "other": Counter()}
    for one, count in tells.items():
        coin, told = one.split(" ", 1)
        by_coin[coin][told] += count
    same, other = by_coin["same"], by_coin["other"]
    return (
        {one for one in same if not other[one] and same[one] >= LEAST_TOLD},
        {one for one in other if not same[one] and other[one] >= LEAST_TOLD},
    )


def measure(server: BenchmarkServer, asked: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"benchmark": "timing_oracle", "trials": asked.trials, "faults": []}
    for name, first, second, number in (
        ("one tenant", SPY, SPY, max(20, asked.trials // 5)),
        ("two tenants", VICTIM, SPY, asked.trials),
    ):
        trials = Trials(server, asked, seed=len(result))
        trials.run(first, second, 5)
        trials.tells.clear()
        other, same = trials.run(first, second, number)
        found, told = auc(same, other), tellings(trials.tells)
        print(f"{name}: AUC {found:.3f} of {number} trials; medians {median_ms(same)} and {median_ms(other)} ms")
        result[name.replace(" ", "_")] = {
            "auc": round(found, 4), "median_ms_same": median_ms(same), "median_ms_other": median_ms(other),
            "fields_tell": bool(told[0] or told[1]),
        }  # fmt: skip
        if first == second and (found < LEAST_SEEN or not told[0]):
            result["faults"].append(f"within one tenant nothing is seen (AUC {found:.3f}): the test is blind")
        if first != second and abs(found - 0.5) > MOST_AUC - 0.5:
            result["faults"].append(f"times tell: AUC {found:.3f}")
        if first != second and any(told):
            result["faults"].append(f"fields or headers tell: {sorted(told[0])[:1]} against {sorted(told[1])[:1]}")
    return result


def median_ms(times: Sequence[float]) -> float:
    return round(sorted(times)[len(times) // 2] * 1e3, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--prompt-len", type=int, default=96)
    parser.add_argument("--answer-len", type=int, default=8)
    parser.add_argument("flags", nargs="*", help="of serve, after --")
    asked = parser.parse_args()
    with BenchmarkServer(asked.model, *asked.flags, keys=(VICTIM, SPY)) as server:
        result = measure(server, asked)
    for fault in result["faults"]:
        print("FAULT", fault)
    print(json.dumps(result))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
