"""What it costs a front to choose one of three replicas for a prompt, in its own processor time.

    python benchmarks/route_choice.py [--tokens 12000] [--times 40]

The more of a prompt is cached somewhere, the more of its blocks have to be hashed: nothing, half, all on one replica,
all on every replica. One JSON object as the last line: milliseconds by case.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from tokenmill import SamplingParams
from tokenmill.fleet.router import PrefixRouter
from tokenmill.fleet.virtual import FIRST_TOKEN, VirtualDevice, run_virtually, virtual_engine, virtual_frontend
from tokenmill.kv.blocks import HashChain
from tokenmill.types import KVCacheEvents, PromptRequest

NUM_REPLICAS = 3
DEVICE = VirtualDevice(num_blocks=20_000)
CASES = {"nothing cached": [0.0], "half on one": [0.5], "all on one": [1.0], "all on every one": [1.0] * NUM_REPLICAS}


async def measure(num_tokens: int, times: int) -> dict[str, dict[str, float]]:
    router, rng = PrefixRouter(NUM_REPLICAS), random.Random(1)
    engine = virtual_engine(DEVICE, NUM_REPLICAS, router)
    await engine.open()
    found: dict[str, dict[str, float]] = {}
    process = virtual_frontend(DEVICE).input_processor(DEVICE.max_context).process
    for name, shares in CASES.items():
        seconds = []
        for _ in range(times):
            tokens = [rng.randrange(FIRST_TOKEN, 127) for _ in range(num_tokens)]
            hashes = HashChain("", DEVICE.block_size).extend(tokens, num_tokens // DEVICE.block_size)
            for place in range(NUM_REPLICAS):
                share = shares[place] if place < len(shares) else 0.0
                stored = list(hashes[: int(share * len(hashes))])
                router.index.apply(place, KVCacheEvents(number=0, is_snapshot=True, stored=stored))
            request = process(PromptRequest(prompt=tokens, params=SamplingParams(max_tokens=4)))
            began = time.thread_time()
            router.choose(request, engine._replicas.all)
            seconds.append(time.thread_time() - began)
        found[name] = {"p50 ms": round(statistics.median(seconds) * 1e3, 3), "max ms": round(max(seconds) * 1e3, 3)}
    await engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--times", type=int, default=40)
    given = parser.parse_args()
    print(json.dumps(run_virtually(measure(given.tokens, given.times))))


if __name__ == "__main__":
    main()
