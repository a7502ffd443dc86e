"""Triton's part of a start: preparations of libraries in threads, and kernels compiled by copies of this process.

The code lives in `ops/triton/launch` (`preload`, `compile_workers`) and is switched on here only.
"""

from __future__ import annotations

import torch

from tokenmill.config import EngineConfig
from tokenmill.engine.backends import TRITON
from tokenmill.engine.startup.versions import is_tested


def prestart_triton(config: EngineConfig) -> None:
    """Let Triton get ready while the device is opened and weights are loaded, where it may be needed."""
    is_wanted = config.ops.backend in ("auto", TRITON.name) and config.ops.device in ("auto", "cuda")
    if not is_wanted or not torch.cuda.is_available() or not is_tested("triton"):
        return
    from tokenmill.ops.triton.launch import compile_workers, preload  # imports Triton: once, in one thread

    compile_workers.enable()
    preload.begin()


def prestart_products(config: EngineConfig) -> None:
    """Load the library of matrix products beside the model. `config` is resolved: the device's memory is counted."""
    if config.ops.backend != TRITON.name:
        return
    from tokenmill.ops.triton.launch import compile_workers, preload

    if compile_workers.is_enabled():
        preload.begin_products(torch.device(config.ops.device))
