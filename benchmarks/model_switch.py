"""How long a server with several models and room for one takes to answer from another one than last.

    python benchmarks/model_switch.py MODEL OTHER [--rounds 8]

The models are asked in turns for one token, each time for another prompt: once right after the other model (a switch:
the old one is let go of, this one is loaded) and once more (loaded already). The difference is the switch. The first
turn of each model, which fills the caches on disk, is not counted. One JSON object as the last line; exit code 1 if a
model's median switch takes longer than --limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import httpx
from served import BenchmarkServer


def answer_s(client: httpx.Client, model: str, number: int) -> float:
    body = {"model": model, "messages": [{"role": "user", "content": f"Number {number}?"}], "max_tokens": 1}
    started = time.perf_counter()
    client.post("/v1/chat/completions", json={**body, "temperature": 0}).raise_for_status()
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--limit", type=float, default=2.0, help="seconds")
    options = parser.parse_args()
    switched: dict[str, list[float]] = {}
    loaded: dict[str, list[float]] = {}
    with (
        BenchmarkServer(*options.models, "--max-loaded-models", "1", served_name=None) as server,
        httpx.Client(base_url=server.url, timeout=600) as client,
    ):
        names = [row["id"] for row in client.get("/v1/models").json()["data"]]
        for turn in range(options.rounds + 1):
            for name in names[1:] + names[:1]:  # the first is loaded from the start
                times_s = [answer_s(client, name, 2 * turn + again) for again in (0, 1)]
                if turn:
                    switched.setdefault(name, []).append(times_s[0])
                    loaded.setdefault(name, []).append(times_s[1])
    found = {}
    for name in names:
        switch_s, most_s = statistics.median(switched[name]), max(switched[name])
        loaded_s = statistics.median(loaded[name])
        print(f"{name:40} {switch_s:6.2f} s after another model (at most {most_s:.2f}), {loaded_s:.2f} s loaded")
        found[name] = {"switch_s": round(switch_s, 3), "most_s": round(most_s, 3), "loaded_s": round(loaded_s, 3)}
    print(json.dumps({"benchmark": "model_switch", "rounds": options.rounds, **found}))
    return 0 if all(one["switch_s"] <= options.limit for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
