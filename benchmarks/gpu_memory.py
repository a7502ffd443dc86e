"""GPU memory as planned and as allocated, part by part: weights, rows, the largest step, graphs, KV pool, all of it.

    python benchmarks/gpu_memory.py DIR_WITH_CONFIG [--quantization fp8] [--kv-dtype int8] ...

The parts are measured while an engine is put together by the engine's own functions; `used` is what the driver says has
gone since the process began, after every batch size was captured and requests have run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tokenmill.arch.read import read_spec
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.engine import build
from tokenmill.engine.backends import StoredWeights
from tokenmill.engine.resolve import Resolved, compute_request, resolve_model_config
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.params import SamplingParams
from tokenmill.types import Request

MIB = 1 << 20


def settled(given: argparse.Namespace, spec: Any) -> Resolved:
    model = ModelConfig(
        given.model,
        load_format="dummy",
        dtype="bfloat16",
        max_context=given.max_context,
        quantization=given.quantization,
    )
    config = EngineConfig(
        model,
        CacheConfig(given.block_size, kv_dtype=given.kv_dtype, num_blocks=given.num_blocks),
        SchedulerConfig(given.max_running, given.token_budget, max_waiting=4096),
        OpsConfig(device="cuda", deterministic=given.deterministic),
    )
    return resolve_model_config(config, spec, Path(given.model))


def planned(resolved: Resolved, spec: Any) -> dict[str, int]:
    config, runner = resolved.config, resolved.workspace
    cache = config.cache
    layout = KVLayout.from_spec(spec, CacheDtypes(cache.kv_dtype, config.model.dtype))
    assert cache.num_blocks is not None
    request = compute_request(config, spec, resolved.device, resolved.backend)
    return {
        "pool": cache.num_blocks * layout.block_bytes(cache.tokens_per_block),
        "weights": resolved.backend.kept_weights(StoredWeights(spec, None), request).parts.total,
        "rows": runner.rows,
        "step": runner.step,
        "graphs": runner.graphs,
        "kernels": resolved.device.start_bytes,
    }


def kept_back() -> int:
    """What torch can't give back to the driver: live tensors, and the pools of graphs."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


class AllocationMeter:
    """What torch has allocated since the last look."""

    def __init__(self) -> None:
        self.seen = torch.cuda.memory_allocated()

    def more(self) -> int:
        before, self.seen = self.seen, torch.cuda.memory_allocated()
        return self.seen - before


def measured(resolved: Resolved, spec: Any) -> dict[str, int]:
    config = resolved.config
    free_before = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    found, meter = {}, AllocationMeter()
    storage = build.kv_storage(config, spec)
    found["pool"] = meter.more()
    model = resolved.backend.build_model(config, spec, build.open_source(config, Path(config.model.model), spec))
    torch.cuda.empty_cache()
    found["weights"] = meter.more()
    core = build.assemble(config, model, storage)
    found["rows"] = meter.more()
    runner: Any = core.runner
    runner.compile_first(config.scheduler.num_tokens, while_compiling=list)
    torch.cuda.reset_peak_memory_stats()
    runner.run_widest_step(config.scheduler.num_tokens)
    found["step"] = torch.cuda.max_memory_allocated() - meter.seen
    reserved = kept_back()
    runner.capture_largest()
    runner.prepare()
    found["graphs"] = kept_back() - reserved
    runner.hold(resolved.workspace.step)
    serve(core)
    torch.cuda.synchronize()
    found["reserved"] = torch.cuda.memory_reserved()
    found["used"] = free_before - torch.cuda.mem_get_info()[0]
    found["kernels"] = found["used"] - found["reserved"]
    return found


def serve(core: Any) -> None:
    """Requests of every kind: long and short, drawn on the device and by the host."""
    rng = random.Random(0)
    kinds = ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "typical_p": 0.9})
    for number in range(300):
        params = SamplingParams(max_tokens=20, ignore_eos=True, **kinds[number % 3])
        prompt = [rng.randrange(1000, 30_000) for _ in range(rng.choice((50, 300, 3000)))]
        core.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params, max_tokens=20, seed=number))
    while core.has_work:
        errors = [output.error for output in core.step() if output.error]
        assert not errors, errors[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    for name in ("max-running", "token-budget", "num-blocks"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=CacheConfig.block_size)
    given = parser.parse_args()
    torch.cuda.init()
    spec = read_spec(Path(given.model))
    resolved = settled(given, spec)
    plan = planned(resolved, spec)
    found = measured(resolved, spec)
    for part, size in plan.items():
        print(f"{part:10} planned {size / MIB:12,.1f} MiB   measured {found[part] / MIB:12,.1f} MiB")
    total = sum(plan.values())
    print(f"{'all':10} planned {total / MIB:12,.1f} MiB   measured {found['used'] / MIB:12,.1f} MiB")
    off = found["used"] / total - 1
    print(f"measured is {off:+.2%} of planned; torch has reserved {found['reserved'] / MIB:,.1f} MiB")
    print(json.dumps({"planned": plan, "measured": found, "off": off}))


if __name__ == "__main__":
    main()
