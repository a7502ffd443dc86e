"""The estimate is the allocation: a real engine's memory against its plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.ops.cpu import is_available
from tokenmill.planner.device import plan_device
from tokenmill.planner.memory import Limits, Split, plan_memory
from tokenmill.planner.model import model_at

SCRIPT = """
import json, re, sys
from tokenmill.engine.llm import LLM
from tokenmill.params import SamplingParams
llm = LLM(sys.argv[1], max_context=2048, max_running=8, token_budget=512, num_blocks=8 * 128 + 1,
          kv_dtype=sys.argv[2], threads=1)
storage = llm.core.runner.storage
storage.copy_blocks([(0, i) for i in range(storage.num_blocks)])  # memory counts once it is touched
llm.generate([[i + 1] * 600 for i in range(8)], SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
resident = int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
print(json.dumps({"pool": storage.num_bytes, "resident": resident}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not is_available()[0], reason="needs Linux and the native kernels")
@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_planned_bytes_are_the_engine_s(smollm2_path: Path, kv_dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(smollm2_path), kv_dtype],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    model = model_at(smollm2_path, "smollm2")
    device = replace(plan_device("Xeon 8380"), available_bytes=64 << 30)
    limits = Limits(context=2048, max_running=8, token_budget=512)
    parts = model.weights("auto")
    plan = plan_memory(model.spec, parts, kv_dtype, device, Split(), limits, file_bytes=parts.total)
    assert plan.kv_pool == measured["pool"]
    assert plan.resident == pytest.approx(measured["resident"], rel=0.05)
