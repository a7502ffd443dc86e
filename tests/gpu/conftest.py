"""Kernels are compiled by several processes, as in a fast start: with an empty cache one would take minutes."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def compile_workers_enabled() -> None:
    if torch.cuda.is_available():
        from tokenmill.ops.triton.launch import compile_workers

        compile_workers.enable()
