"""How long a start takes, from a cold process to the first token, and where the time goes.

A fresh Python runs each round, so that every import is paid for:

    process ─► import tokenmill ─► import the engine (torch) ─► load weights ─► first token
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from tokenmill.bench.measures import median
from tokenmill.errors import RequestFailed

STAGES = ("python_s", "import_s", "engine_import_s", "load_s", "first_token_s", "total_s")

SCRIPT = """
import json, sys, time
python = time.time()
import tokenmill
imported = time.time()
from tokenmill.engine.llm import LLM
from tokenmill.params import SamplingParams
engine = time.time()
llm = LLM(sys.argv[2], **json.loads(sys.argv[3]))
loaded = time.time()
prompt = "hi" if llm.front.tokenizer else [1, 2, 3]
next(iter(llm.stream(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))))
first = time.time()
began = float(sys.argv[1])
print(json.dumps({"python_s": python - began, "import_s": imported - python, "engine_import_s": engine - imported,
                  "load_s": loaded - engine, "first_token_s": first - loaded, "total_s": first - began}))
"""


def measure_start(model: str, settings: dict[str, Any]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(time.time()), model, json.dumps(settings)], capture_output=True, text=True
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RequestFailed(f"the started process failed: {last[0][:300]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure_starts(model: str, settings: dict[str, Any], rounds: int) -> dict[str, float]:
    """Medians of several starts; the first warms the disk's cache and is left out when there are more."""
    found = [measure_start(model, settings) for _ in range(rounds)]
    counted = found[1:] if len(found) > 1 else found
    return {stage: median([one[stage] for one in counted]) for stage in STAGES}
