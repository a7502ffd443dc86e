"""This engine under the same protocol as its peers; it is also told how to round activations and what is the most that
will be asked, since it makes room once."""

from __future__ import annotations

import json
import sys

import tokenmill
from tokenmill.bench.offline import OfflineWorkload, config_for, measure_concurrency, open_measured
from tokenmill.bench.traffic import Lengths
from tokenmill.config import EngineConfig, ModelConfig, OpsConfig


def workload(asked: dict[str, int]) -> OfflineWorkload:
    prompt, answer = (Lengths(asked[key], asked[key]) for key in ("input_len", "output_len"))
    return OfflineWorkload(prompt, answer, (asked["concurrency"],), seed=asked["seed"])


def main() -> None:
    path, threads, bits, most = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    ops = OpsConfig(threads=threads, activation_bits=bits)  # type: ignore[arg-type]  # checked by the caller
    measured = open_measured(config_for(EngineConfig(ModelConfig(model=path), ops=ops), workload(most)))
    print(json.dumps({"ready": True, "version": f"tokenmill {tokenmill.__version__}"}), flush=True)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        found = measure_concurrency(measured, workload(asked), asked["concurrency"], number)
        print(json.dumps({key: found[key] for key in ("prefill_tok_s", "decode_tok_s")}), flush=True)


if __name__ == "__main__":
    main()
