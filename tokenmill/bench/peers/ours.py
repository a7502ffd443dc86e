"""This engine under the same protocol as its peers; a third argument says how activations are rounded."""

from __future__ import annotations

import json
import sys

import tokenmill
from tokenmill.bench.lengths import Lengths
from tokenmill.bench.offline import OfflineWorkload, config_for, measure_concurrency, open_measured
from tokenmill.config import EngineConfig, ModelConfig, OpsConfig

MAX_TOKENS = 4096
MAX_SEQUENCES = 64


def workload(asked: dict[str, int]) -> OfflineWorkload:
    prompt, answer = (Lengths(asked[key], asked[key]) for key in ("input_len", "output_len"))
    return OfflineWorkload(prompt, answer, (asked["concurrency"],), seed=asked["seed"])


def main() -> None:
    path, threads, bits = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    ops = OpsConfig(threads=threads, activation_bits=bits)  # type: ignore[arg-type]
    config = EngineConfig(ModelConfig(model=path, max_context=MAX_TOKENS), ops=ops)
    largest = {"input_len": MAX_TOKENS - 1, "output_len": 1, "concurrency": MAX_SEQUENCES, "seed": 0}
    measured = open_measured(config_for(config, workload(largest)))
    print(json.dumps({"ready": True, "version": f"tokenmill {tokenmill.__version__}"}), flush=True)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        found = measure_concurrency(measured, workload(asked), asked["concurrency"], number)
        print(json.dumps({key: found[key] for key in ("prefill_tok_s", "decode_tok_s")}), flush=True)


if __name__ == "__main__":
    main()
