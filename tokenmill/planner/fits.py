"""Memory needs of models on this machine: planned exactly where their files are here, by a rule of thumb elsewhere.

The rule of thumb reads the number of parameters and the type of the weights from the catalog's description ("1.5B
Instruct, Q4_K_M"), adds a fifth for the KV cache, as everyone does before a download, and what any process takes.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.errors import TokenmillError
from tokenmill.hardware.memory import probe_memory
from tokenmill.planner.device import PlanDevice, this_machine
from tokenmill.planner.memory import CPU_RUNTIME_BYTES, GPU_CONTEXT_BYTES, rule_of_thumb_bytes
from tokenmill.planner.serving import serving_plan
from tokenmill.store import find_entry

PARAMETERS = re.compile(r"\b(\d+(?:\.\d+)?)([MB])\b")
WEIGHT_TYPE = re.compile(r"\b(Q\d\w+|BF16|F16|F32)\b")
SCALE = {"M": 1e6, "B": 1e9}
MIXED_BITS = {"Q4_K_M": 4.85, "Q4_K_S": 4.6, "Q5_K_M": 5.7, "Q6_K": 6.6, "BF16": 16.0, "F16": 16.0, "F32": 32.0}


@dataclass(frozen=True)
class Fit:
    """The memory a model needs here. `is_planned`: from its files, not by the rule of thumb."""

    needs_bytes: int
    is_planned: bool
    tokens_s: float | None = None  # of one answer alone


class FitHere:
    """Answers for many models with one measurement of the machine."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def device(self) -> tuple[str, int]:
        """Name of the device, and its bytes for models at this moment."""
        machine = self._machine
        return machine.name, probe_memory().available_bytes if machine.is_cpu else machine.available_bytes

    @cached_property
    def _machine(self) -> PlanDevice:
        return this_machine(use_gpu=self._config.ops.device != "cpu", threads=self._config.ops.threads)

    def of_files(self, name: str, path: Path) -> dict[str, Any] | None:
        """Plan a model whose files are here; None if it can't be planned."""
        try:
            plan = serving_plan(self._config, path, name, self._machine)
        except (TokenmillError, OSError):
            return None
        memory = plan.memory
        needs = memory.total - memory.kv_pool + memory.kv_per_request  # room for one request of full length
        return asdict(Fit(needs, True, 1 / plan.tpot_s if plan.tpot_s else None))

    def of_catalog(self, name: str) -> dict[str, Any] | None:
        """The rule of thumb for a model of the catalog; None if its description says too little."""
        entry = find_entry(name)
        found = None if entry is None else PARAMETERS.search(entry.about)
        kind = None if entry is None else WEIGHT_TYPE.search(entry.about)
        if found is None or kind is None:
            return None
        num_parameters = float(found[1]) * SCALE[found[2]]
        runtime = CPU_RUNTIME_BYTES if self._machine.is_cpu else GPU_CONTEXT_BYTES
        return asdict(Fit(runtime + int(rule_of_thumb_bytes(num_parameters, bits_of(kind[1]))), False))


def bits_of(kind: str) -> float:
    """Bits a weight of a GGUF type takes, its scales included."""
    return MIXED_BITS.get(kind) or float(kind[1]) + 0.5
