"""Triton's part of the start-up optimisations: loading libraries in threads, and compiling kernels in copies of this
process.

The code is in `ops/triton/launch` (`preload`, `compile_workers`); this module turns it on.
"""

from __future__ import annotations

import torch

from tokenmill.config import EngineConfig
from tokenmill.engine.backends import TRITON
from tokenmill.engine.startup.versions import is_tested


def prestart_triton(config: EngineConfig) -> None:
    """Prepare Triton, if it may be used, while the device is opened and weights are loaded."""
    may_be_used = config.ops.backend in ("auto", TRITON.name) and config.ops.device in ("auto", "cuda")
    if not may_be_used or not torch.cuda.is_available() or not is_tested("triton"):
        return
    from tokenmill.ops.triton.launch import compile_workers, preload  # imports Triton

    compile_workers.enable()
    preload.begin()


def prestart_products(config: EngineConfig) -> None:
    """Load the library of matrix products while the model is loaded. `config` must be resolved: the library takes
    device memory, which must be measured before."""
    if config.ops.backend != TRITON.name:
        return
    from tokenmill.ops.triton.launch import compile_workers, preload

    if compile_workers.is_enabled():
        preload.begin_products(torch.device(config.ops.device))
